#include "done.h"

#include <cstring>

namespace paceline::tensorflow {
namespace {
constexpr int kDestroy = 3;  // libstdc++'s std::_Manager_operation
}

void Done::move(Function& to, Function& from) {
  std::memcpy(&to, &from, sizeof(Function));
  from.manager = nullptr;
  from.invoker = nullptr;
}

Done::Done(TF_AsyncOpKernelDoneCallback* lent) {
  move(function_, *reinterpret_cast<Function*>(lent));
}

Done::Done(Done&& other) noexcept { move(function_, other.function_); }

Done::~Done() {
  if (function_.manager != nullptr) function_.manager(&function_, &function_, kDestroy);
}

void Done::run() {
  tf().TF_RunAsyncOpKernelDoneCallback(reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(&function_));
}

}  // namespace paceline::tensorflow
