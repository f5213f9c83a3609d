#include "attach.h"

#include <mutex>
#include <string>

namespace paceline::tensorflow {
namespace {

std::mutex mutex;
std::shared_ptr<agreement::NamedQueue>& current() {
  static auto* instance =
      new std::shared_ptr<agreement::NamedQueue>;  // outlives static destruction
  return *instance;
}
thread_local std::string last_error;

}  // namespace

std::shared_ptr<agreement::NamedQueue> queue() {
  std::lock_guard lock(mutex);
  return current();
}

}  // namespace paceline::tensorflow

extern "C" {

/// From now on the kernels run on `comm`, which is theirs alone. All ranks call it. `timeout_s`: how long an all-reduce
/// waits for ranks that have not reached it. `keeps_residuals`: 1 when the settings' codec does. 0, or comm.h's code.
PACELINE_API int paceline_tensorflow_attach(paceline_comm* comm, double timeout_s,
                                            int keeps_residuals) {
  using namespace paceline;
  if (tensorflow::queue() != nullptr) {
    tensorflow::last_error = "there is a communicator already: shut it down first";
    return PACELINE_INVALID_ARGUMENT;
  }
  agreement::Outcome error;
  auto made = agreement::NamedQueue::create(comm, timeout_s, error);
  tensorflow::last_error = error.text;
  if (made == nullptr) return error.code;
  made->codec_keeps_residuals = keeps_residuals != 0;
  std::lock_guard lock(tensorflow::mutex);
  tensorflow::current() = std::move(made);
  return PACELINE_OK;
}

/// Waits for the other ranks' detach (bounded), then ends what is pending. The communicator may be destroyed
/// afterwards.
PACELINE_API void paceline_tensorflow_detach() {
  std::shared_ptr<paceline::agreement::NamedQueue> last;
  {
    std::lock_guard lock(paceline::tensorflow::mutex);
    last.swap(paceline::tensorflow::current());
  }
  // A kernel on another thread may have taken the queue a moment ago and hold it for longer than the communicator lives.
  if (last != nullptr) last->close();
}

PACELINE_API const char* paceline_tensorflow_error() {
  return paceline::tensorflow::last_error.c_str();
}
}
