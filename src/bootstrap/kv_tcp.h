// The client of our own key-value server.
#pragma once

#include <map>
#include <memory>
#include <set>

#include "bootstrap/host_address.h"
#include "bootstrap/kv.h"
#include "bootstrap/kv_frame.h"

namespace paceline::bootstrap {

class KvServer;

class TcpKeyValue final : public KeyValue {
 public:
  /// `server` (rank 0's own) is served inside poll(); nullptr elsewhere. The host is resolved here:
  /// kUnavailable names one that can't be.
  static Result<std::unique_ptr<TcpKeyValue>> open(const std::string& host, uint16_t port,
                                                   std::vector<std::byte> secret,
                                                   std::shared_ptr<KvServer> server);
  ~TcpKeyValue() override;

  Status put(const std::string& key, const std::string& value) override;
  Result<std::optional<std::string>> get(const std::string& key) override;
  Status poll(Time now) override;
  [[nodiscard]] std::string describe() const override { return name_; }
  /// What travels is authenticated, not hidden.
  [[nodiscard]] bool is_private() const override { return false; }
  /// Why there is no connection at the moment; ok while there is one.
  [[nodiscard]] Status trouble() const override { return trouble_; }
  /// The local address of the connection, once there is one: this machine's address towards rank 0.
  [[nodiscard]] std::optional<HostAddress> local() const;

 private:
  TcpKeyValue() = default;
  void connect(Time now);
  void disconnected(Time now, const std::string& why);
  Status read(Time now);
  Status handle(const KvFrame& frame);
  void ask(const std::string& key);
  void write();

  std::string name_;
  std::vector<HostAddress> addresses_;
  std::size_t next_address_ = 0;
  std::vector<std::byte> secret_;
  std::shared_ptr<KvServer> server_;
  int fd_ = -1;
  bool connected_ = false;
  bool ready_ = false;  ///< both sides have proven themselves
  bool was_there_ = false;
  Nonce server_nonce_{};
  Nonce nonce_{};
  std::vector<std::byte> in_;
  std::vector<std::byte> out_;
  std::map<std::string, std::string>
      put_;  ///< everything put, to be said again on a new connection
  std::map<std::string, std::string> values_;
  std::set<std::string> asked_;
  Status fatal_;
  Status trouble_;
  Time retry_at_ = 0;
  Time pause_ = 0;
  Time give_up_at_ = 0;  ///< on the address that was asked last
};

}  // namespace paceline::bootstrap
