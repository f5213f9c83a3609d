// For tests: a libpmix.so.2 for one process, rank 3 of a job. What is put can be read once it is committed and fenced.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "drivers/pmix/api.h"

namespace {

using paceline::drivers::pmix::Info;
using paceline::drivers::pmix::kGlobal;
using paceline::drivers::pmix::kNotFound;
using paceline::drivers::pmix::kString;
using paceline::drivers::pmix::Proc;
using paceline::drivers::pmix::PublishedData;
using paceline::drivers::pmix::Value;

constexpr int kBadParameter = -27;
constexpr const char* kJob = "job.1";
constexpr uint32_t kRank = 3;

using Entries = std::map<std::string, std::string>;
Entries put, committed, visible, published;  // NOLINT(cert-err58-cpp): a test's
int users = 0;

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int PMIx_Init(Proc* self, void* /*info*/, std::size_t /*infos*/) {
  if (std::getenv("PMIX_NAMESPACE") != std::string(kJob)) return kNotFound;
  std::memcpy(self->nspace, kJob, std::strlen(kJob) + 1);
  self->rank = kRank;
  ++users;
  return 0;
}
EXPORTED int PMIx_Finalize(const void* /*info*/, std::size_t /*infos*/) {
  --users;
  return 0;
}
EXPORTED int PMIx_Put(uint8_t scope, const char* key, Value* value) {
  if (scope != kGlobal || value->type != kString) return kBadParameter;
  put[key] = value->data.string;
  return 0;
}
EXPORTED int PMIx_Commit() {
  for (const auto& [key, value] : put) committed[key] = value;
  return 0;
}
EXPORTED int PMIx_Fence(const Proc* procs, std::size_t count, const void* /*info*/, std::size_t) {
  if (procs != nullptr || count != 0) return kBadParameter;  // all of the job
  visible = committed;
  return 0;
}
EXPORTED int PMIx_Get(const Proc* from, const char* key, const void* /*info*/, std::size_t,
                      Value** value) {
  const auto found = visible.find(key);
  if (from->nspace != std::string(kJob) || from->rank != kRank || found == visible.end())
    return kNotFound;
  *value = static_cast<Value*>(std::calloc(1, sizeof(Value)));
  (*value)->type = kString;
  (*value)->data.string = ::strdup(found->second.c_str());
  return 0;
}
EXPORTED int PMIx_Publish(const Info* info, std::size_t count) {
  if (count != 1 || info->value.type != kString) return kBadParameter;
  published[info->key] = info->value.data.string;
  return 0;
}
EXPORTED int PMIx_Lookup(PublishedData* data, std::size_t count, const Info* /*info*/,
                         std::size_t) {
  if (count != 1) return kBadParameter;
  const auto found = published.find(data->key);
  if (found == published.end()) return kNotFound;
  data->value.type = kString;
  data->value.data.string = ::strdup(found->second.c_str());
  return 0;
}
EXPORTED const char* PMIx_Error_string(int code) {
  return code == kNotFound ? "NOT-FOUND" : "BAD-PARAM";
}
/// How often it has been initialised and not ended.
EXPORTED int stand_in_users() { return users; }
