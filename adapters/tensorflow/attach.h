// The queue that this process's kernels use: made by init(), ended by shutdown().
#pragma once

#include <memory>

#include "named_queue.h"

namespace paceline::tensorflow {

/// Null before attach and after detach.
std::shared_ptr<agreement::NamedQueue> queue();

}  // namespace paceline::tensorflow
