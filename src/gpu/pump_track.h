// How the pump's parts hand something to a wire and hear of its end.
#pragma once

#include <memory>

#include "gpu/pump.h"

namespace paceline::gpu {

/// `submit` hands an operation of that kind to the wire, with the notice that it is given.
template <class Submit>
Status Pump::track(const Wire& wire, const Shared& o, size_t piece, Kind kind, Submit submit,
                   uint64_t bytes) {
  auto ticket = std::make_unique<Ticket>(Ticket{this, &wire, o, piece, kind, bytes});
  {
    std::lock_guard lock(mutex_);
    ++under_way_;
    if (kind == Kind::kSend) {
      ++o->sends_left;
      to_leave_[static_cast<size_t>(&wire - wires_.data())] += bytes;
    }
  }
  const auto notify = [](void* context, paceline_op ended, paceline_code code) {
    const std::unique_ptr<Ticket> t(static_cast<Ticket*>(context));
    t->pump->ended(*t, ended, code);
  };
  const Result<paceline_op> op = submit(wire, Notice{notify, ticket.get()});
  if (op) {
    ticket.release();  // NOLINT(bugprone-unused-return-value): the notice's now
    return Status::ok();
  }
  const std::lock_guard lock(mutex_);
  --under_way_;
  return op.status();
}

}  // namespace paceline::gpu
