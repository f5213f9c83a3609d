// A key-value store handed in through the C ABI (torch's, say), as bootstrap sees it.
#pragma once

#include <memory>

#include "bootstrap/kv.h"
#include "paceline/comm.h"

namespace paceline::capi {

/// The callbacks are used during paceline_comm_create() only, on its thread.
std::shared_ptr<bootstrap::KeyValue> wrap_store(const paceline_store& store);

}  // namespace paceline::capi
