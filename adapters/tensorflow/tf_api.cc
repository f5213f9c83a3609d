#include "tf_api.h"

#include <dlfcn.h>

namespace paceline::tensorflow {
namespace {
TfApi api;  // written once, by bind_tf_api(), before the first operation is registered
}

std::string bind_tf_api() {
  // RTLD_NOLOAD: only the copy that Python has loaded already; its symbols are not in the global scope, where
  // an unresolved symbol of this library would be looked for.
  void* library = ::dlopen("libtensorflow_framework.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr)
    return "libtensorflow_framework.so.2 is not loaded: import tensorflow first";
  std::string missing;
#define PACELINE_TF_BIND(name, result, arguments)                            \
  api.name = reinterpret_cast<result(*) arguments>(::dlsym(library, #name)); \
  if (api.name == nullptr) missing += missing.empty() ? #name : ", " #name;
  PACELINE_TF_FUNCTIONS(PACELINE_TF_BIND)
#undef PACELINE_TF_BIND
  if (missing.empty()) return {};
  return "this TensorFlow lacks " + missing + " in its C API; 2.13 or later has them";
}

const TfApi& tf() { return api; }

}  // namespace paceline::tensorflow
