// Told where something that holds a lock is about to do what takes long and needs little of it.
#pragma once

#include <cerrno>
#include <cstddef>

namespace paceline {

/// Between begin() and end() other threads may do what the owner says they may: see Engine and Channel.
class Interlude {
 public:
  virtual ~Interlude() = default;
  virtual void begin() = 0;
  virtual void end() = 0;
};

/// An interlude for as long as it lives, where there is somebody to tell and so many bytes are worth it. Keeps errno: it is
/// put around calls of the kernel.
class OpenFor {
 public:
  OpenFor(Interlude* interlude, std::size_t bytes)
      : interlude_(bytes >= kWorth ? interlude : nullptr) {
    if (interlude_ != nullptr) interlude_->begin();
  }
  OpenFor(const OpenFor&) = delete;
  OpenFor& operator=(const OpenFor&) = delete;
  ~OpenFor() {
    const int error = errno;
    if (interlude_ != nullptr) interlude_->end();
    errno = error;
  }

 private:
  static constexpr std::size_t kWorth = 64 * 1024;
  Interlude* interlude_;
};

}  // namespace paceline
