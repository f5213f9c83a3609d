// From the settings to what the engine and each operation want to know.
#pragma once

#include <string>
#include <vector>

#include "base/settings.h"
#include "base/types.h"
#include "bootstrap/topology.h"
#include "engine/engine.h"
#include "paceline/comm.h"

namespace paceline::capi {

/// `timeout_s`: the caller's, 0: the settings'.
engine::EngineOptions engine_options(const Settings& settings, double timeout_s);

/// The codec that an operation asks for (args.codec, ratio, fp16_values), with the settings where it leaves them
/// open. Settings apply to all-reduces of float32 by sum or average only, and top-k from topk_threshold bytes on;
/// all else travels exactly.
plan::CodecSpec codec_for(const Settings& settings, const paceline_op_args& args);

/// True on the rank that warns of settings, for the whole job.
bool speaks(const Settings& settings, Rank job_rank);

/// Logs each sentence that this process has not logged yet.
void warn_once(const std::vector<std::string>& warnings);

/// What was asked for that only CUDA tensors get, one sentence each: which variable, and what becomes of tensors of the
/// CPU instead.
std::vector<std::string> lost_on_the_cpu(const Settings& settings);

/// The job's ranks on this machine, which share its cores. The launcher tells of `job_local_size` on this node; the
/// topology's may be a group of them.
int sharing_ranks(const bootstrap::Topology& topology, int job_local_size);

/// Threads that code a bucket of top-k: the settings', or what suits the cores and who shares them.
int codec_threads(const Settings& settings, const bootstrap::Topology& topology,
                  int job_local_size);

}  // namespace paceline::capi
