// Who made a lab, and everything that a lab leaves in the system, so that it can be removed: by the
// lab itself, by its janitor (when the lab was killed), or by the next lab (when both were).
//
// A lab is named after its owner's pid and start time: a name that no other process can have while
// the machine is up. Namespaces are called paceline-PID-START-n0 … and -sw (the switch); files live
// in $TMPDIR/paceline-lab-PID-START (until that is locked: paceline-fresh-…). With --keep the names begin with paceline-keep- and only
// --remove-kept ends them. In a container the same pid is another's: a lab is also known to live by the lock that it holds
// in its folder.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace paceline::lab {

struct Owner {
  pid_t pid = 0;
  uint64_t start = 0;  ///< clock ticks after boot, from /proc/PID/stat
  bool keep = false;

  static Owner self(bool keep);
  /// Its process runs here, or its folder is locked (by a process of another pid namespace that shares this file system).
  [[nodiscard]] bool alive() const;
  /// "paceline-PID-START-" or "paceline-keep-PID-START-".
  [[nodiscard]] std::string prefix() const;
  /// What the lab's ranks are told as PACELINE_LAB_NAME.
  [[nodiscard]] std::string lab_name() const;
  /// The lab's own folder.
  [[nodiscard]] std::string directory() const;
};

/// A lab's folder, locked as long as the process that made it lives. remove_lab() removes it.
class Folder {
 public:
  /// kUnavailable where it can't be made, or another lab has this one's name.
  static Result<Folder> make(const Owner& owner);
  Folder(Folder&& other) noexcept;
  Folder& operator=(Folder&& other) noexcept;
  ~Folder();

 private:
  explicit Folder(int lock) : lock_(lock) {}
  int lock_ = -1;
};

/// Kills every process in the owner's namespaces, and every one that is told by its environment to be of this lab;
/// removes the namespaces and the folder. Does nothing where nothing is left. Returns 0 when all is gone, else the errno.
int remove_lab(const Owner& owner);

struct Removed {
  struct Left {
    std::string prefix;  ///< of its namespaces
    int error;           ///< errno: why they, or its folder, are still there
  };
  int labs = 0;  ///< of which nothing is left
  std::vector<Left> left;
};
/// Removes what dead owners have left behind; kept labs too if asked.
Removed remove_stale(bool kept_too);

/// What the janitor hears while the lab works.
enum class JanitorWord : int32_t {
  kStarted,  ///< a process group lives
  kEnded,  ///< it does not any more; said while its leader's pid can't have been given to others yet
  kRemoved,  ///< the lab has cleaned up
  kKept,     ///< the lab leaves everything as it is
};
/// One write, that a process between fork() and exec() may do too.
void tell_janitor(int listener, JanitorWord word, pid_t group = 0);

/// A process that outlives a killed lab by the moment that it takes to clean up.
class Janitor {
 public:
  /// Forks; call before there are threads.
  static Result<Janitor> start(const Owner& owner);
  Janitor() = default;
  Janitor(Janitor&& other) noexcept;
  Janitor& operator=(Janitor&& other) noexcept;
  ~Janitor() { dismiss(false); }
  /// For tell_janitor(); close-on-exec.
  [[nodiscard]] int listener() const { return pipe_; }
  /// Orderly end: the lab has cleaned up, or `keep`s.
  void dismiss(bool keep);

 private:
  int pipe_ = -1;
  pid_t pid_ = -1;
};

}  // namespace paceline::lab
