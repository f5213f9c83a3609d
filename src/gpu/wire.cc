#include "gpu/wire.h"

#include <cstring>

#include "base/types.h"

namespace paceline::gpu {
namespace {

Status status_of(paceline_code code, const paceline_comm* comm) {
  if (code == PACELINE_OK) return Status::ok();
  const char* text = paceline_error(comm);
  return {static_cast<Code>(code),
          text == nullptr || *text == '\0' ? paceline_code_name(code) : text};
}

}  // namespace

Result<paceline_identity> Wire::identity() const {
  paceline_identity i{};
  i.struct_size = sizeof i;
  PACELINE_RETURN_IF_ERROR(status_of(paceline_comm_identity(comm_, &i), comm_));
  return i;
}

Result<std::vector<std::string>> Wire::gather(const std::string& mine, size_t bytes,
                                              const char* name) const {
  PACELINE_ASSIGN(auto me, identity());
  std::string in = mine;
  in.resize(bytes);
  std::string out(bytes * static_cast<size_t>(me.size), '\0');
  paceline_op_args a{};
  a.struct_size = sizeof a;
  a.collective = 2;
  a.dtype = static_cast<int32_t>(DType::kUInt8);
  a.input = in.data();
  a.output = out.data();
  a.count = bytes;
  a.name = name;
  PACELINE_RETURN_IF_ERROR(status_of(paceline_run(comm_, &a, nullptr), comm_));
  std::vector<std::string> all;
  all.reserve(static_cast<size_t>(me.size));
  for (int r = 0; r < me.size; ++r)
    all.push_back(out.substr(static_cast<size_t>(r) * bytes, bytes));
  return all;
}

namespace {

paceline_transfer_args transfer(int rank, uint32_t tag, void* data, uint64_t bytes,
                                const char* name, bool any_length, Notice notice) {
  paceline_transfer_args a{};
  a.struct_size = sizeof a;
  a.peer = rank;
  a.tag = tag;
  a.data = data;
  a.bytes = bytes;
  a.name = name;
  a.any_length = any_length ? 1 : 0;
  a.notify = notice.call;
  a.context = notice.context;
  return a;
}

}  // namespace

Result<paceline_op> Wire::send(int rank, uint32_t tag, const void* data, uint64_t bytes,
                               const char* name, bool any_length, Notice notice) const {
  auto a = transfer(rank, tag, const_cast<void*>(data), bytes, name, any_length,
                    notice);  // sends only read it
  paceline_op op = 0;
  PACELINE_RETURN_IF_ERROR(status_of(paceline_send(comm_, &a, &op), comm_));
  return op;
}

Result<paceline_op> Wire::receive(int rank, uint32_t tag, void* data, uint64_t bytes,
                                  const char* name, bool any_length, Notice notice) const {
  auto a = transfer(rank, tag, data, bytes, name, any_length, notice);
  paceline_op op = 0;
  PACELINE_RETURN_IF_ERROR(status_of(paceline_receive(comm_, &a, &op), comm_));
  return op;
}

Result<paceline_op> Wire::largest(int32_t* word, const char* name, const char* shape,
                                  Notice notice) const {
  paceline_op_args a{};
  a.struct_size = sizeof a;
  a.dtype = static_cast<int32_t>(DType::kInt32);
  a.reduce_op = static_cast<int32_t>(ReduceOp::kMax);
  a.input = word;
  a.output = word;
  a.count = 1;
  a.name = name;
  a.shape = shape;
  a.notify = notice.call;
  a.context = notice.context;
  paceline_op op = 0;
  PACELINE_RETURN_IF_ERROR(status_of(paceline_submit(comm_, &a, &op), comm_));
  return op;
}

Result<uint32_t> Wire::group(const std::vector<int>& ranks) const {
  uint32_t group = 0;
  const std::vector<int32_t> members(ranks.begin(), ranks.end());
  PACELINE_RETURN_IF_ERROR(
      status_of(paceline_group_create(comm_, members.data(), members.size(), &group), comm_));
  return group;
}

Status Wire::end_group(uint32_t group) const {
  return status_of(paceline_group_destroy(comm_, group), comm_);
}

Result<paceline_op> Wire::meet(uint32_t group, const char* name, Notice notice) const {
  paceline_op_args a{};
  a.struct_size = sizeof a;
  a.collective = 5;
  a.group = group;
  a.name = name;
  a.notify = notice.call;
  a.context = notice.context;
  paceline_op op = 0;
  PACELINE_RETURN_IF_ERROR(status_of(paceline_submit(comm_, &a, &op), comm_));
  return op;
}

Status Wire::wait(paceline_op op) const {
  return status_of(paceline_wait(comm_, op, -1, nullptr), comm_);
}

Status Wire::ended(paceline_op op, paceline_code code) const {
  if (code == PACELINE_OK) return Status::ok();
  std::string text(2048, '\0');
  text.resize(std::min(paceline_op_error(comm_, op, text.data(), text.size()), text.size() - 1));
  return {static_cast<Code>(code), text.empty() ? paceline_code_name(code) : text};
}

Status Wire::health() const { return status_of(paceline_comm_health(comm_), comm_); }

void Wire::hold(const char* why) const { paceline_comm_hold(comm_, why); }

void Wire::weigh(double parts) const { paceline_comm_weigh(comm_, parts); }

void Wire::abort(const std::string& reason) const { paceline_comm_abort(comm_, reason.c_str()); }

void Wire::abort(const Status& why) const {
  paceline_comm_abort_as(comm_, static_cast<paceline_code>(why.code()), why.message().c_str());
}

void Wire::fail(const Status& failure) const {
  paceline_comm_fail(comm_, static_cast<paceline_code>(failure.code()), failure.message().c_str());
}

Status Wire::destroy() const {
  const auto code = paceline_comm_destroy(comm_);
  return status_of(code, nullptr);
}

Result<paceline_comm*> make_companion(paceline_comm* comm) {
  paceline_comm* made = nullptr;
  PACELINE_RETURN_IF_ERROR(status_of(paceline_comm_companion(comm, &made), comm));
  return made;
}

std::string setting(const char* name) {
  std::string text(256, '\0');
  text.resize(std::min(paceline_setting(nullptr, name, text.data(), text.size()), text.size() - 1));
  return text;
}

}  // namespace paceline::gpu
