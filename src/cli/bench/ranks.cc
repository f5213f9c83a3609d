#include "cli/bench/ranks.h"

#include <cstdio>

namespace paceline::bench {
namespace {

Status run(paceline_comm* comm, paceline_op_args& args) {
  args.struct_size = sizeof args;
  args.codec = 0;
  args.name = "bench's own";
  paceline_result result{};
  result.struct_size = sizeof result;
  paceline_code code = paceline_run(comm, &args, &result);
  if (code == PACELINE_OK) return Status::ok();
  return {static_cast<Code>(code), paceline_error(comm)};
}

}  // namespace

Status maximum(paceline_comm* comm, std::vector<double>& values) {
  paceline_op_args args{};
  args.collective = 0;
  args.dtype = 1;
  args.reduce_op = 3;
  args.input = args.output = values.data();
  args.count = values.size();
  return run(comm, args);
}

Result<std::string> share(paceline_comm* comm, int rank, std::string text) {
  uint64_t length = text.size();
  paceline_op_args args{};
  args.collective = 1;
  args.dtype = 7;
  args.input = args.output = &length;
  args.count = 1;
  PACELINE_RETURN_IF_ERROR(run(comm, args));
  if (rank != 0) text.resize(length);
  args.dtype = 8;
  args.input = args.output = text.data();
  args.count = length;
  PACELINE_RETURN_IF_ERROR(run(comm, args));
  return text;
}

Status barrier(paceline_comm* comm) {
  paceline_op_args args{};
  args.collective = 5;
  return run(comm, args);
}

Status all_ok(paceline_comm* comm, int rank, const Status& mine, const std::string& otherwise) {
  if (!mine) std::fprintf(stderr, "paceline bench: rank %d: %s\n", rank, mine.to_string().c_str());
  std::vector<double> failed = {mine ? 0.0 : 1.0};
  PACELINE_RETURN_IF_ERROR(maximum(comm, failed));
  return failed[0] == 0 ? Status::ok() : Status(Code::kAborted, otherwise);
}

}  // namespace paceline::bench
