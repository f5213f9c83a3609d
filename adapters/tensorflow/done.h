// The callback that ends an asynchronous kernel, taken over from TensorFlow.
//
// TF_AsyncOpKernelDoneCallback* points at a std::function<void()> that lives on TensorFlow's stack: it is gone when
// the kernel's compute function returns, so keeping the pointer crashes. It has to be moved out. TensorFlow is
// built against libstdc++, whose std::function is
//     16 bytes  the callable, or a pointer to it (a callable stored in place is trivially relocatable there)
//      8 bytes  manager: copies, destroys, …; null: empty
//      8 bytes  invoker
// so moving is: copy the 32 bytes, empty the source. This adapter may itself be linked with another C++ library;
// hence the layout is spelled out instead of named std::function.
#pragma once

#include <cstddef>

#include "tf_api.h"

namespace paceline::tensorflow {

class Done {
 public:
  explicit Done(TF_AsyncOpKernelDoneCallback* lent);
  Done(Done&& other) noexcept;
  Done(const Done&) = delete;
  Done& operator=(const Done&) = delete;
  Done& operator=(Done&&) = delete;
  ~Done();
  /// Ends the kernel; its context is gone afterwards. At most once.
  void run();

 private:
  struct Function {
    alignas(std::max_align_t) std::byte callable[16];
    bool (*manager)(void* to, const void* from, int operation);
    void* invoker;
  };
  static_assert(sizeof(Function) == 32);
  static void move(Function& to, Function& from);
  Function function_{};
};

}  // namespace paceline::tensorflow
