// The server of a job's key-value space: lives in rank 0, or in `paceline run`. Driven by its
// owner's thread. The sockets are here; what is said on them is the space's affair (kv_space.h).
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "bootstrap/kv_space.h"

namespace paceline::bootstrap {

struct KvServerOptions {
  std::string address;  ///< numeric, to bind: "10.0.0.1", "::1"
  uint16_t port = 0;    ///< 0: the kernel picks
  std::vector<std::byte> secret;
  std::size_t connection_limit = 16384;  ///< of this job's ranks
  std::size_t stranger_limit =
      128;  ///< connections that have not proven themselves; beyond: the oldest goes
  std::size_t memory_limit = 64 << 20;  ///< bytes of keys and values
  Time proof_timeout = 5 * kSecond;
  // What another port or address is chosen by, for messages.
  std::string port_setting = "PACELINE_PORT";
  std::string address_setting = "MASTER_ADDR";
};

class KvServer {
 public:
  /// kResourceExhausted names the port that is taken, or says that there are no descriptors left; kUnavailable an address
  /// that this machine does not have, or a port that this user may not have. Both say what to set.
  static Result<std::unique_ptr<KvServer>> start(KvServerOptions options);
  ~KvServer();
  KvServer(const KvServer&) = delete;
  KvServer& operator=(const KvServer&) = delete;

  /// Serves what has arrived; never blocks.
  void serve(Time now);
  /// Readable when serve() has something to do.
  [[nodiscard]] int poll_fd() const { return epoll_; }
  [[nodiscard]] uint16_t port() const { return port_; }
  [[nodiscard]] std::size_t connections() const { return clients_.size(); }
  [[nodiscard]] uint64_t refused() const { return refused_; }

 private:
  struct Client {
    int fd = -1;  ///< and its number in the space
    std::string from;
    Time since = 0;
    bool wants_write = false;
  };
  explicit KvServer(KvServerOptions options)
      : options_(std::move(options)), space_(options_.secret, {.memory = options_.memory_limit}) {}
  void accept_some(Time now);
  void read(Client& client);
  /// Sends what clients were told by what another one said.
  void flush_told();
  void flush(Client& client);
  void refuse(Client& client, const Status& why);
  void close(int fd);
  void expire(Time now);

  KvServerOptions options_;
  KvSpace space_;
  int listener_ = -1;
  int epoll_ = -1;
  uint16_t port_ = 0;
  std::map<int, std::unique_ptr<Client>> clients_;
  uint64_t refused_ = 0;
  bool paused_ = false;
  Time resume_at_ = 0;
};

}  // namespace paceline::bootstrap
