// PMI-1 as MPICH's Hydra speaks it over PMI_FD: lines of "name=value" words. Parser and client, no MPI library.
//
//   → cmd=init pmi_version=1 pmi_subversion=1        ← cmd=response_to_init … rc=0
//   → cmd=get_maxes                                  ← cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024
//   → cmd=get_my_kvsname                             ← cmd=my_kvsname kvsname=kvs_1_0
//   → cmd=put kvsname=… key=… value=…                ← cmd=put_result rc=0 msg=success
//   → cmd=barrier_in                                 ← cmd=barrier_out          (once every rank has asked)
//   → cmd=get kvsname=… key=…                        ← cmd=get_result rc=0 msg=success value=…
//   → cmd=publish_name service=… port=…              ← cmd=publish_result info=ok rc=0 msg=success   (Slurm: no rc)
//   → cmd=lookup_name service=…                      ← cmd=lookup_result port=… info=ok rc=0 msg=success
//   → cmd=finalize                                   ← cmd=finalize_ack
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/status.h"

namespace paceline::bootstrap {

inline constexpr std::size_t kPmiLineLimit = 4096;

/// The words of one line (without its end). kCorrupted: a word without '=', no "cmd", a word twice.
Result<std::map<std::string, std::string>> parse_pmi_line(std::string_view line);

/// One conversation over a descriptor that the process manager gave us. Questions are answered by a local process
/// at once, so they block (at most `patience`); only the barrier waits for other ranks and is asked for and polled.
class Pmi1Client {
 public:
  /// Greets the process manager. Does not own `fd`.
  static Result<Pmi1Client> open(int fd, Time patience = 10 * kSecond);

  Status put(const std::string& key, const std::string& value);
  /// kUnavailable: no such key.
  Result<std::string> get(const std::string& key);
  /// Names that all of the job see at once, also while they wait in the barrier. kUnavailable: it was refused.
  Status publish(const std::string& name);
  Result<bool> is_published(const std::string& name);
  Status enter_barrier();
  /// True once every rank has entered.
  Result<bool> left_barrier();
  /// Without it the process manager takes this process's end for a crash.
  Status finalize();

  [[nodiscard]] std::size_t key_limit() const { return key_limit_; }
  [[nodiscard]] std::size_t value_limit() const { return value_limit_; }
  [[nodiscard]] bool in_barrier() const { return in_barrier_; }

 private:
  using Words = std::map<std::string, std::string>;
  Pmi1Client(int fd, Time patience) : fd_(fd), patience_(patience) {}
  Status say(const std::string& line);
  Result<Words> ask(const std::string& line, const std::string& expected);
  Result<Words> ask(const std::string& line, const std::string& expected, Time patience);
  /// The next line's words; empty after `wait_ms` of silence.
  Result<Words> hear(int wait_ms);

  int fd_;
  Time patience_;
  std::string buffer_;
  std::string space_;
  std::size_t key_limit_ = 0;
  std::size_t value_limit_ = 0;
  bool in_barrier_ = false;
  Status silent_;  ///< a question has had no answer: what comes now may be to that one
};

}  // namespace paceline::bootstrap
