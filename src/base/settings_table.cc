#include "base/settings_table.h"

#include <array>

namespace paceline {
namespace {

using enum SettingType;
using enum Support;
using F = Family;

constexpr Alias kLogLevel[] = {
    {"HOROVOD_LOG_LEVEL", F::kHorovod,
     "trace=trace|debug=debug|info=info|warning=warning|error=error|fatal=error"}};
constexpr Alias kAlgorithm[] = {
    {"LIGHT_2D_ALLREDUCE", F::kLight, "0=|1=two_level"},
    {"PERSEUS_ALLREDUCE_MODE", F::kPerseus, "auto=|0=ring|1=two_level"},
    {"HOROVOD_HIERARCHICAL_ALLREDUCE", F::kHorovod, "0=|1=two_level"},
    {"HOROVOD_TORUS_ALLREDUCE", F::kHorovod, "0=|1=two_level"},
};
constexpr Alias kCodec[] = {
    {"LIGHT_TOPK_ALLREDUCE", F::kLight, "0=|1=topk"},
    {"PERSEUS_ALLREDUCE_DTYPE", F::kPerseus, "0=fp16|1=none|2=fp16"},
};
constexpr Alias kCodecScope[] = {
    {"PERSEUS_ALLREDUCE_DTYPE", F::kPerseus, "0=everywhere|1=|2=between_nodes"},
};
constexpr Alias kTopkRatio[] = {{"LIGHT_TOPK_RATIO", F::kLight}};
constexpr Alias kTopkThreshold[] = {{"LIGHT_TOPK_THRESHOLD", F::kLight}};
constexpr Alias kTopkFp16[] = {{"LIGHT_TOPK_FP16", F::kLight}};
constexpr Alias kInnerSize[] = {{"LIGHT_INTRA_SIZE", F::kLight, {}, "1..65536"}};
constexpr Alias kHierarchicalThreshold[] = {{"LIGHT_HIERARCHICAL_THRESHOLD", F::kLight}};
constexpr Alias kGradientScale[] = {{"PERSEUS_ALLREDUCE_GRADIENT_SCALE", F::kPerseus}};
constexpr Alias kLanes[] = {
    {"PERSEUS_ALLREDUCE_STREAMS", F::kPerseus, {}, "1..12"},
    {"TIACC_TRAINING_NUM_NCCL_STREAMS", F::kTiacc},
    {"HOROVOD_NUM_NCCL_STREAMS", F::kHorovod},
};
constexpr Alias kFusionThreshold[] = {
    {"TIACC_TRAINING_FUSION_THRESHOLD", F::kTiacc},
    {"HOROVOD_FUSION_THRESHOLD", F::kHorovod},
};
constexpr Alias kFusionBuckets[] = {{"PERSEUS_ALLREDUCE_FUSION", F::kPerseus, {}, {}}};
constexpr Alias kNanCheck[] = {{"PERSEUS_ALLREDUCE_NANCHECK", F::kPerseus},
                               {"PERSEUS_ALLREDUCE_NANHECK", F::kPerseus}};
constexpr Alias kAccumulate[] = {{"PERSEUS_ACCUMULATE_N_STEPS", F::kPerseus}};
constexpr Alias kDownsample[] = {{"PERSEUS_DOWNSAMPLE_N_ELEMENTS", F::kPerseus}};
constexpr Alias kMomentum[] = {{"PERSEUS_GRADIENT_MOMENTUM", F::kPerseus}};
constexpr Alias kRdma[] = {{"PERSEUS_NCCL_ENABLE", F::kPerseus}};
constexpr Alias kOffline[] = {{"PERSEUS_OFFLINE_NEG", F::kPerseus}};
constexpr Alias kPerfCheck[] = {{"PERSEUS_PERF_CHECK_N_STEPS", F::kPerseus}};
constexpr Alias kPort[] = {{"PERSEUS_MASTER_PORT", F::kPerseus}};
constexpr Alias kInterface[] = {
    {"PERSEUS_NCCL_NETWORK_INTERFACE", F::kPerseus},
    {"PERSEUS_GLOO_NETWORK_INTERFACE", F::kPerseus, {}, {}, true},
    {"HOROVOD_GLOO_IFACE", F::kHorovod},
    {"NCCL_SOCKET_IFNAME", F::kOther},
    {"GLOO_SOCKET_IFNAME", F::kOther},
};
constexpr Alias kTimeout[] = {
    {"GLOO_TIMEOUT_SECONDS", F::kPerseus},
    {"HOROVOD_GLOO_TIMEOUT_SECONDS", F::kHorovod},
};
constexpr Alias kStartTimeout[] = {{"HOROVOD_START_TIMEOUT", F::kHorovod}};
constexpr Alias kCycleTime[] = {{"HOROVOD_CYCLE_TIME", F::kHorovod}};
constexpr Alias kCacheCapacity[] = {{"HOROVOD_CACHE_CAPACITY", F::kHorovod}};
constexpr Alias kTimeline[] = {{"HOROVOD_TIMELINE", F::kHorovod}};
constexpr Alias kTimelineMarks[] = {{"HOROVOD_TIMELINE_MARK_CYCLES", F::kHorovod}};
constexpr Alias kAutotune[] = {{"HOROVOD_AUTOTUNE", F::kHorovod}};
constexpr Alias kAutotuneLog[] = {{"HOROVOD_AUTOTUNE_LOG", F::kHorovod}};
constexpr Alias kThreadAffinity[] = {{"HOROVOD_THREAD_AFFINITY", F::kHorovod}};
constexpr Alias kStallDisable[] = {{"HOROVOD_STALL_CHECK_DISABLE", F::kHorovod}};
constexpr Alias kStallWarn[] = {{"HOROVOD_STALL_CHECK_TIME_SECONDS", F::kHorovod}};
constexpr Alias kStallShutdown[] = {{"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", F::kHorovod}};
constexpr Alias kElasticTimeout[] = {{"HOROVOD_ELASTIC_TIMEOUT", F::kHorovod}};
constexpr Alias kHvdAllgather[] = {{"PERSEUS_CHANGE_HVD_ALLGATHER", F::kPerseus}};
constexpr Alias kDdpLauncher[] = {{"PERSEUS_USE_DDP_LAUNCHER", F::kPerseus}};

constexpr SettingRow kRows[] = {
    // The switch and what is printed.
    {"disable", kFlag, "0", "",
     "Turns the Python package off: a torch script runs as if it had not imported it, but for the "
     "variables of torch's launcher, which mpirun and srun don't set: it gets them all the same. "
     "Who asks for Paceline by name (the backend paceline, TensorFlow) gets an error that says so; "
     "paceline.Communicator and the C ABI work all the same."},
    {"quiet", kFlag, "0", "",
     "No start-up line and no warnings about settings; what PACELINE_LOG_LEVEL lets through, "
     "Python's own warnings and errors still appear."},
    {"log_level", kChoice, "warning", "trace|debug|info|warning|error|off",
     "What is logged to standard error: info how each rank has joined, debug also who else has and "
     "every plan that is made.",
     kLogLevel},
    // What travels.
    {"codec", kChoice, "none", "none|fp16|bf16|topk|int8",
     "How float32 gradients travel: none is exact; fp16 and bf16 halve the bytes; topk sends the "
     "largest entries and keeps the rest as a residual for the next step; int8 sends a quarter of "
     "the bytes and keeps the rounding as a residual (CUDA tensors; those of the CPU travel "
     "exactly).",
     kCodec, "perseus=fp16"},
    {"codec_scope", kChoice, "between_nodes", "between_nodes|everywhere",
     "Where fp16 and bf16 apply: between nodes only, or inside a node too.", kCodecScope,
     "perseus=everywhere"},
    {"topk_ratio", kNumber, "0.01", "0<..1", "Fraction of the entries that topk sends.",
     kTopkRatio},
    {"topk_threshold", kInteger, "1048576", "0..",
     "topk applies to buffers of at least this many bytes; smaller ones travel exactly (none with "
     "topk_momentum, which "
     "stands for the optimizer's own in all of a model).",
     kTopkThreshold},
    {"topk_fp16", kFlag, "0", "", "topk's values travel as fp16.", kTopkFp16},
    {"topk_momentum", kNumber, "0", "0..0.9999",
     "Momentum correction of topk on CUDA tensors: applied on every rank before the selection; the "
     "optimizer's own momentum must then be 0."},
    {"gradient_scale", kNumber, "1", "1e-30..1e30",
     "Gradients are multiplied by this before the cast to fp16 and divided after it.",
     kGradientScale, "perseus=10"},
    {"nan_check",
     kFlag,
     "0",
     "",
     "Checks every gradient for NaN before it travels.",
     kNanCheck,
     {},
     kKnown},
    {"accumulate_steps",
     kInteger,
     "1",
     "1..",
     "Accumulates locally and communicates every so many steps.",
     kAccumulate,
     {},
     kKnown},
    {"downsample",
     kInteger,
     "1",
     "1..",
     "Gossip: one of so many elements travels a step.",
     kDownsample,
     {},
     kKnown},
    {"gradient_momentum",
     kNumber,
     "1",
     "0..",
     "Momentum correction that goes with downsample.",
     kMomentum,
     {},
     kKnown},
    // By which plan.
    {"algorithm", kChoice, "auto", "auto|ring|doubling|tree|direct|two_level|sparse",
     "The plan of an all-reduce; auto chooses by size, nodes and codec.", kAlgorithm},
    {"cuda_path", kChoice, "auto", "auto|paceline|torch",
     "How gradients of CUDA models travel: paceline: through Paceline, or an error that says why "
     "not; torch: torch's own all-reduce; auto: through Paceline between nodes where that can be."},
    {"node_gather", kChoice, "auto", "auto|copies|nccl",
     "How what has come spreads to the other GPUs of a node in an all-reduce of CUDA tensors: "
     "copies: by copy engines, from one GPU's memory to another's; nccl: by NCCL's all-gather; "
     "auto: copies, where all GPUs of every node can read each other's memory."},
    {"node_reduce", kChoice, "auto", "auto|copies|nccl",
     "How gradients of CUDA tensors come to the GPU of a node that adds them up: copies: by copy "
     "engines, where node_gather is by copies too and a GPU's share is long; nccl: by NCCL's "
     "reduce-scatter; auto: copies for top-k and for models of up to 256 MiB of gradients, "
     "whose steps the model's kernels bound, or its host; else nccl."},
    {"node_ctas", kInteger, "16", "1..64",
     "Thread blocks (CTAs) of the GPU that NCCL may take for a collective of CUDA tensors inside a "
     "node, beside the model's."},
    {"sparse_rows", kChoice, "auto", "auto|off",
     "Gradients of untied embeddings of CUDA models: auto: only the rows that are not zero travel, "
     "where that takes fewer bytes; off: all of them do."},
    {"inner_size", kInteger, "0", "0..65536",
     "Ranks in the inner group of two-level plans; 0: the node's own.", kInnerSize},
    {"hierarchical_threshold", kInteger, "1073741824", "0..",
     "Two-level plans only for buffers of at most this many bytes: where PACELINE_ALGORITHM asks "
     "for them, or this is set.",
     kHierarchicalThreshold},
    {"lanes", kInteger, "1", "1..64",
     "Streams of the GPU over which the pieces of big buffers may overtake each other; the CPU's "
     "need none for that.",
     kLanes},
    {"wire_threads", kChoice, "auto", "auto|1|2|3|4|5|6|7|8",
     "Threads with which a rank's CUDA tensors travel between nodes, each with connections of its "
     "own; auto: 4 for a rank that has a node of 8 cores or more to itself, 2 where the node has "
     "at "
     "least 4 cores a rank, else 1."},
    {"codec_threads", kChoice, "auto", "auto|1|2|3|4|5|6|7|8|9|10|11|12|13|14|15|16",
     "Threads with which a rank codes a bucket of a model on the CPU under top-k, and reads and "
     "adds up what lies in the memory of its node's other ranks; auto: half of the cores that it "
     "may use, which it shares with the job's ranks on its machine unless there are as many for "
     "each; one to four."},
    {"piece_bytes", kInteger, "524288", "4096..1073741824",
     "The largest message; bigger buffers are cut and pipelined."},
    {"fusion_threshold", kInteger, "4194304", "0..",
     "Largest bucket of fused gradients in bytes, where the script chooses none; 0: no fusion. "
     "While it is unset top-k takes 33554432 for models on the CPU where a rank has less than two "
     "cores.",
     kFusionThreshold},
    {"fusion_buckets", kText, "auto", "",
     "Bucket size = all gradients / this (1–128), where the script chooses none; 0: no fusion.",
     kFusionBuckets},
    {"cycle_time",
     kNumber,
     "1",
     "0..",
     "Milliseconds between rounds of agreement; 0: no wait.",
     kCycleTime,
     {},
     kKnown},
    {"cache_capacity",
     kInteger,
     "1024",
     "0..",
     "Entries of the plan cache.",
     kCacheCapacity,
     {},
     kKnown},
    {"offline_agreement",
     kFlag,
     "0",
     "",
     "Freezes the order of tensors once it has repeated.",
     kOffline,
     {},
     kKnown},
    {"autotune",
     kFlag,
     "0",
     "",
     "Tunes plan parameters while the job runs.",
     kAutotune,
     {},
     kKnown},
    {"autotune_log", kText, "", "", "File for the tuner's samples.", kAutotuneLog, {}, kKnown},
    // Over which wire.
    {"wire", kChoice, "auto", "auto|tcp|shm",
     "auto: shared memory inside a node, TCP between nodes; tcp: TCP only; shm: shared memory only "
     "(one node)."},
    {"flows", kInteger, "2", "1..16",
     "TCP data flows to each peer; peers that are sent to at a time share so many, one each at "
     "least."},
    {"zero_copy", kChoice, "auto", "auto|0|1",
     "Long TCP messages leave from the caller's memory without a copy. auto: to other machines; 1: "
     "also to namespaces and containers of this one, which may after an abort still receive what "
     "that memory holds by then."},
    {"link_rate", kNumber, "0", "0..",
     "Gb/s that a node's network carries each way, as 25: no rank sends faster than its share (of "
     "ranks with GPUs by what each has to send), so that none is through early and the link stays "
     "full to the end; 0: as fast as TCP lets it."},
    {"interface", kText, "", "",
     "Network interface (name, prefix, or ^excluded, as NCCL_SOCKET_IFNAME); empty: the one that "
     "reaches the master.",
     kInterface},
    {"port", kInteger, "6666", "1..65535",
     "Port of the rendezvous on rank 0 where neither a launcher nor torch's store provides one; "
     "where that store is used beside it, must differ from its MASTER_PORT.",
     kPort},
    {"checksum", kChoice, "auto", "auto|on|off",
     "CRC32C over the payloads of TCP connections: what arrives changed is sent again. auto: off, "
     "for the layers below have "
     "checksums of their own."},
    {"rdma", kFlag, "0", "", "Uses RDMA and Ethernet links together.", kRdma, {}, kKnown},
    {"shm_pull", kChoice, "auto", "auto|mapped|process_vm_readv|copy",
     "How ranks of one node read each other's memory."},
    // How long.
    {"timeout", kNumber, "300", "0<..",
     "Seconds an operation may take before it fails by name. Under torch, where it is not set: "
     "as long as the process group's time-out.",
     kTimeout, "perseus=60"},
    {"start_timeout", kNumber, "120", "0<..", "Seconds to wait for all ranks at start-up.",
     kStartTimeout},
    {"peer_timeout", kNumber, "30", "0<..",
     "Seconds a peer on another node may stay silent before it counts as lost."},
    {"stall_check_disable",
     kFlag,
     "0",
     "",
     "No warnings about stalled tensors.",
     kStallDisable,
     {},
     kKnown},
    {"stall_check_time",
     kNumber,
     "60",
     "0..",
     "Seconds before a stalled tensor is reported.",
     kStallWarn,
     {},
     kKnown},
    {"stall_shutdown_time",
     kNumber,
     "0",
     "0..",
     "Seconds before a stalled tensor ends the job; 0: never.",
     kStallShutdown,
     {},
     kKnown},
    {"elastic_timeout",
     kNumber,
     "600",
     "0<..",
     "Seconds to wait for enough slots after a resize.",
     kElasticTimeout,
     {},
     kKnown},
    // Who and where.
    {"rank", kInteger, "-1", "-1..",
     "This process's rank, set by `paceline run`; -1: from the launcher's environment."},
    {"size", kInteger, "-1", "-1..", "Ranks in the job, set by `paceline run`."},
    {"local_rank", kInteger, "-1", "-1..", "Rank inside the node, set by `paceline run`."},
    {"local_size", kInteger, "-1", "-1..", "Ranks on the node, set by `paceline run`."},
    {"job_id", kText, "", "", "Distinguishes jobs that meet by mistake, set by `paceline run`."},
    {"rendezvous", kText, "", "",
     "host:port of the key-value server, set by `paceline run`; empty: MASTER_ADDR and port."},
    {"secret", kText, "", "",
     "The job's secret, at least 16 characters; every connection must prove it."},
    {"secret_file", kText, "", "", "A file that holds the secret."},
    {"node_id", kText, "", "",
     "Ranks with the same text share a node; empty: boot id and network namespace."},
    {"use_ddp_launcher", kFlag, "1", "",
     "1: torch launcher's environment first; 0: mpirun's first.", kDdpLauncher},
    // Faces.
    {"change_hvd_allgather",
     kFlag,
     "0",
     "",
     "Order of gathered rows: 0 as DDP, 1 as Horovod.",
     kHvdAllgather,
     {},
     kKnown},
    {"thread_affinity",
     kText,
     "",
     "",
     "Cores to pin engine threads to, one per local rank, comma separated.",
     kThreadAffinity,
     {},
     kKnown},
    {"timeline",
     kText,
     "",
     "",
     "File for a Chrome trace of all operations.",
     kTimeline,
     {},
     kKnown},
    {"timeline_mark_cycles",
     kFlag,
     "0",
     "",
     "Marks every round in the trace.",
     kTimelineMarks,
     {},
     kKnown},
    {"perf_check_steps",
     kInteger,
     "0",
     "0..",
     "Every so many steps finds and prints abnormal devices.",
     kPerfCheck,
     {},
     kKnown},
    // For tools of this project; listed so that they are not taken for mistakes.
    {"library", kText, "", "", "Path of libpaceline.so for the Python package."},
    {"cache", kText, "", "", "Where ./dev keeps environments and sources."},
    {"python", kText, "", "",
     "Set by an installed package's `paceline`: its interpreter, for `paceline bench --vs gloo`."},
    {"launched", kText, "", "",
     "Set by the Python package, where PACELINE_USE_DDP_LAUNCHER was asked: of which rank of which "
     "mpirun torch's variables are, for the processes that this one starts."},
    {"sim_seed", kText, "", "", "Replays one seed of the simulation."},
    {"lab_bytes", kText, "", "",
     "Set by `paceline lab`: where a rank reads its node's link counters."},
    {"lab_rate", kText, "", "", "Set by `paceline lab`: the links' rate in bit/s."},
    {"lab_delay", kText, "", "",
     "Set by `paceline lab`: seconds from one node to another, where --delay adds some; as "
     "measured, of the longest."},
    {"lab_nodes", kText, "", "", "Set by `paceline lab`: how many nodes it made."},
    {"lab_slots", kText, "", "", "Set by `paceline lab`: ranks on each node."},
    {"lab_name", kText, "", "", "Set by `paceline lab`: the lab's own name."},
};

constexpr ForeignVariable kForeign[] = {
    {"HOROVOD_CONTROLLER", kNoMeaning, "one controller is built in"},
    {"HOROVOD_CPU_OPERATIONS", kNoMeaning, "one implementation is built in"},
    {"HOROVOD_HIERARCHICAL_ALLGATHER", kKnown, "two-level all-gather"},
    {"HOROVOD_BATCH_D2D_MEMCOPIES", kNoMeaning, ""},
    {"HOROVOD_DISABLE_GROUP_FUSION", kKnown, "group fusion"},
    {"HOROVOD_ENABLE_ASYNC_COMPLETION", kNoMeaning, ""},
    {"HOROVOD_ENABLE_XLA_OPS", kKnown, "XLA custom calls"},
    {"HOROVOD_MPI_THREADS_DISABLE", kNoMeaning, ""},
    {"HOROVOD_ADASUM_MPI_CHUNK_SIZE", kKnown, "Adasum"},
    {"HOROVOD_CCL_CACHE", kNoMeaning, ""},
    {"HOROVOD_DYNAMIC_PROCESS_SETS", kKnown, "dynamic process sets"},
    {"HOROVOD_ELASTIC", kKnown, "elastic jobs"},
    {"HOROVOD_AUTOTUNE_WARMUP_SAMPLES", kKnown, "autotuning"},
    {"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", kKnown, "autotuning"},
    {"HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", kKnown, "autotuning"},
    {"HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", kKnown, "autotuning"},
    {"HOROVOD_LOG_HIDE_TIME", kNoMeaning, ""},
    {"HOROVOD_LOG_TIMESTAMP", kNoMeaning, ""},
    {"HOROVOD_DISABLE_NVTX_RANGES", kNoMeaning, ""},
    {"HOROVOD_RANK", kNoMeaning, ""},
    {"HOROVOD_SIZE", kNoMeaning, ""},
    {"HOROVOD_LOCAL_RANK", kNoMeaning, ""},
    {"HOROVOD_LOCAL_SIZE", kNoMeaning, ""},
    {"HOROVOD_CROSS_RANK", kNoMeaning, ""},
    {"HOROVOD_CROSS_SIZE", kNoMeaning, ""},
    {"HOROVOD_HOSTNAME", kNoMeaning, ""},
    {"HOROVOD_GLOO_RENDEZVOUS_ADDR", kNoMeaning, ""},
    {"HOROVOD_GLOO_RENDEZVOUS_PORT", kNoMeaning, ""},
    {"HOROVOD_SPARK_START_TIMEOUT", kKnown, "Spark"},
    {"HOROVOD_SPARK_PYTHONPATH", kKnown, "Spark"},
    {"HOROVOD_SPARK_WORK_DIR", kKnown, "Spark"},
    {"HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX", kKnown, "Spark"},
    {"HOROVOD_TEST_GPU", kNoMeaning, ""},
    {"HOROVOD_MIXED_INSTALL", kNoMeaning, ""},
    // Build-time variables of the original: nothing is compiled at installation here.
    {"HOROVOD_WITH_MPI", kNoMeaning, ""},
    {"HOROVOD_WITH_GLOO", kNoMeaning, ""},
    {"HOROVOD_WITH_TENSORFLOW", kNoMeaning, ""},
    {"HOROVOD_WITH_PYTORCH", kNoMeaning, ""},
    {"HOROVOD_WITH_MXNET", kNoMeaning, ""},
    {"HOROVOD_WITH_NVTX", kNoMeaning, ""},
    {"HOROVOD_WITHOUT_MPI", kNoMeaning, ""},
    {"HOROVOD_WITHOUT_GLOO", kNoMeaning, ""},
    {"HOROVOD_WITHOUT_TENSORFLOW", kNoMeaning, ""},
    {"HOROVOD_WITHOUT_PYTORCH", kNoMeaning, ""},
    {"HOROVOD_WITHOUT_MXNET", kNoMeaning, ""},
    {"HOROVOD_WITHOUT_NVTX", kNoMeaning, ""},
    {"HOROVOD_GPU", kNoMeaning, ""},
    {"HOROVOD_GPU_OPERATIONS", kNoMeaning, ""},
    {"HOROVOD_GPU_ALLREDUCE", kNoMeaning, ""},
    {"HOROVOD_GPU_ALLGATHER", kNoMeaning, ""},
    {"HOROVOD_GPU_BROADCAST", kNoMeaning, ""},
    {"HOROVOD_GPU_ALLTOALL", kNoMeaning, ""},
    {"HOROVOD_GPU_REDUCESCATTER", kNoMeaning, ""},
    {"HOROVOD_ALLOW_MIXED_GPU_IMPL", kNoMeaning, ""},
    {"HOROVOD_CUDA_HOME", kNoMeaning, ""},
    {"HOROVOD_BUILD_CUDA_CC_LIST", kNoMeaning, ""},
    {"HOROVOD_ROCM_HOME", kNoMeaning, ""},
    {"HOROVOD_NCCL_HOME", kNoMeaning, ""},
    {"HOROVOD_NCCL_INCLUDE", kNoMeaning, ""},
    {"HOROVOD_NCCL_LIB", kNoMeaning, ""},
    {"HOROVOD_NCCL_LINK", kNoMeaning, ""},
    {"HOROVOD_NVTX_INCLUDE", kNoMeaning, ""},
    {"HOROVOD_BUILD_ARCH_FLAGS", kNoMeaning, ""},
    {"HOROVOD_CMAKE", kNoMeaning, ""},
    {"HOROVOD_DEBUG", kNoMeaning, ""},
    {"HOROVOD_SKIP_COMPILE", kNoMeaning, ""},
    {"HOROVOD_LOCAL_VERSION", kNoMeaning, ""},
};

constexpr NcclVariable kNccl[] = {
    {"NCCL_ALGO", "the algorithms that NCCL may take; those of Paceline: PACELINE_ALGORITHM"},
    {"NCCL_DEBUG", "what NCCL logs; Paceline: PACELINE_LOG_LEVEL"},
    {"NCCL_SOCKET_IFNAME",
     "the interfaces of NCCL's sockets, and of Paceline's where PACELINE_INTERFACE and the "
     "families' "
     "names for it are unset"},
    {"NCCL_IB_DISABLE", "1: NCCL does without InfiniBand and RoCE"},
    {"NCCL_IB_GID_INDEX", "the entry of a RoCE port's table of addresses that NCCL takes"},
    {"NCCL_NET_GDR_LEVEL",
     "how far apart a NIC and a GPU may be for NCCL to have the NIC reach the GPU's memory itself"},
};

}  // namespace

std::span<const SettingRow> setting_rows() { return kRows; }
std::span<const ForeignVariable> foreign_variables() { return kForeign; }
std::span<const NcclVariable> nccl_variables() { return kNccl; }

}  // namespace paceline
