/* The C ABI of the path for CUDA tensors (libpaceline_cuda.so): they go device → pinned memory → wire → device,
 * ordered by streams. The conventions of comm.h hold: structs begin with their size, functions return a paceline_code,
 * paceline_cuda_error() explains the last failure.
 *
 * - No function here waits for the network, except paceline_cuda_create, _reserve, _destroy, _wait_arrival, _wait_operation,
 *   _rest and those of residuals; an all-reduce that may travel by rows (row_elements), which asks what all ranks sent the last
 *   time; and, on three nodes and more, one that finds pinned memory full until other nodes' parts of former ones have come.
 * - Streams and device pointers are the driver API's (CUstream, CUdeviceptr), which the runtime API shares.
 * - All memory is allocated by create and by reserve (and by the writes of residuals and velocities, for what other numbers of ranks
 *   have saved): none while an operation is under way.
 * - All ranks of a communicator submit the same operations in the same order, from one thread at a time.
 */
#ifndef PACELINE_CUDA_H
#define PACELINE_CUDA_H

#include <paceline/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct paceline_cuda paceline_cuda;

/* codecs between the nodes: 0 none (exact), 1 fp16, 2 bf16, 3 top-k, 4 int8 in blocks */

typedef struct paceline_cuda_options {
  size_t struct_size;
  int32_t device;           /* ordinal of the device whose primary context is used */
  int32_t lanes;            /* 0: what the settings say */
  uint64_t piece_bytes;     /* of a pipelined piece's encoding; 0: 4 MiB */
  const char* nccl_library; /* NULL: the one loaded in the process, else libnccl.so.2 */
  uint64_t pinned_bytes;    /* for encodings under way, at least; 0: 32 MiB */
  int32_t
      only_prompt; /* not 0: all-reduces are prompt (see there): no memory for gradients that copies bring */
} paceline_cuda_options;

typedef struct paceline_cuda_args {
  size_t struct_size;
  void* data;                       /* device memory, reduced in place; aligned to 16 bytes */
  uint64_t count;                   /* elements */
  int32_t dtype;                    /* comm.h's: float32, float16, bfloat16 */
  int32_t reduce_op;                /* sum or average */
  int32_t codec;                    /* -1: what the settings say */
  double ratio;                     /* top-k: 0 is what the settings say */
  double momentum;                  /* top-k with momentum correction: the optimizer's; 0: off */
  const paceline_segment* segments; /* codecs with residuals: which parameters the buffer holds */
  size_t segment_count;
  void* stream; /* the stream on which `data` is produced */
  /* Codecs with residuals keep them by it where there are no segments; calls without both share them by their count. */
  const char* name;
  double factor; /* multiplied into every rank's values; 0: 1 */
  /* Not 0: the buffer has rows of so many elements, most of them zero, as the gradient of an embedding has. Only the others
   * travel (codecs none, fp16, bf16) while that takes fewer bytes: decided alike on all ranks by what the last operation
   * of this name and size has met (give names, the same on all ranks), for whose arrival the call waits. */
  uint64_t row_elements;
  /* 1: the caller waits for the result. Pieces are shorter then, so that copies and network overlap within the operation,
   * for some more calls of the driver. The same on all ranks. (Codecs that keep residuals are cut as ever.) */
  int32_t prompt;
} paceline_cuda_args;

/* Reduce-scatter: `input` has a block of `count` elements for every rank, in their order, `output` is one. All-gather: the
 * other way round; `input` may be this rank's block of `output`. Broadcast: `output` is the buffer, `input` is not used.
 * Otherwise input and output must not overlap. Any alignment, any dtype that is only moved. */
typedef struct paceline_cuda_collective_args {
  size_t struct_size;
  int32_t collective; /* comm.h's: broadcast, all-gather, reduce-scatter */
  int32_t dtype;      /* reduce-scatter: float32, float16, bfloat16 */
  int32_t reduce_op;  /* reduce-scatter: sum or average */
  int32_t codec;      /* reduce-scatter of float32 between the nodes: 0 none, 1 fp16, 2 bf16 */
  int32_t root;       /* broadcast */
  const void* input;
  void* output;
  uint64_t count; /* elements of a rank's block; broadcast: of the buffer */
  double factor;  /* reduce-scatter: multiplied into every rank's values; 0: 1 */
  void*
      scratch; /* paceline_cuda_scratch() bytes of device memory, aligned to 256; the operation's until it ends */
  uint64_t scratch_bytes;
  void* stream; /* the stream on which the buffers are ready */
  const char* name;
} paceline_cuda_collective_args;

typedef struct paceline_cuda_stats {
  size_t struct_size;
  uint64_t operations;
  uint64_t wire_bytes; /* this rank handed to the wire, without headers */
  uint64_t device_bytes, pinned_bytes, residual_bytes;
  /* of operations by rows: rows that this rank sent to each other node, and the bounds of their plans */
  uint64_t rows_sent, rows_bound;
  /* nanoseconds from one end of a backward pass to the next, where the host waits there for the GPU to come to the last
   * operations, and where it does not: medians of the last trial, 0 before the first; the shorter way is taken */
  uint64_t pass_ns_waiting, pass_ns_ahead;
  /* operations of which this rank's finite numbers, scaled, were beyond what the wire's type holds (fp16: 65504) and went as
   * its largest number. Sums that are encoded once more between three nodes or more are not looked at. */
  uint64_t saturated;
} paceline_cuda_stats;

/* 1 when there are a driver of a version that has stream memory operations, and a device; 0: `reason` (cut to capacity)
 * names what is missing and the fix. Whether the device does them is tried by paceline_cuda_create(). */
PACELINE_API int paceline_cuda_available(char* reason, size_t capacity);
/* Collective over the ranks of `comm`, which must outlive the handle and carry nothing else meanwhile. */
PACELINE_API paceline_code paceline_cuda_create(paceline_comm* comm,
                                                const paceline_cuda_options* options,
                                                paceline_cuda** cuda);
/* Allocates what buffers of together `bytes` (the largest of `largest`) need per step, counted as float32, the same on all
 * ranks. Call it before the first operation and when the model grows; it waits for what is under way. Where the settings' codec keeps residuals
 * their memory is taken too; else by the first operation that asks for such a codec, which must find nothing under way. */
PACELINE_API paceline_code paceline_cuda_reserve(paceline_cuda* cuda, uint64_t bytes,
                                                 uint64_t largest);
/* Enqueues; returns at once (by rows: see there). The data may be used on `stream` again after paceline_cuda_join(). */
PACELINE_API paceline_code paceline_cuda_all_reduce(paceline_cuda* cuda,
                                                    const paceline_cuda_args* args,
                                                    paceline_op* op);
/* The others, with the same terms: not to be called on ranks whose order is not that of their nodes (all-gather,
 * reduce-scatter: PACELINE_UNSUPPORTED there). */
PACELINE_API paceline_code paceline_cuda_collective(paceline_cuda* cuda,
                                                    const paceline_cuda_collective_args* args,
                                                    paceline_op* op);
/* Bytes of scratch that these arguments need (scratch itself is not looked at). */
PACELINE_API paceline_code paceline_cuda_scratch(const paceline_cuda* cuda,
                                                 const paceline_cuda_collective_args* args,
                                                 uint64_t* bytes);
/* Makes `stream` wait (on the device) for the operation and all before it. The host waits for the device to
 * have come to all but the last ones first, where that was found to make passes shorter. */
PACELINE_API paceline_code paceline_cuda_join(paceline_cuda* cuda, paceline_op op, void* stream);
/* Blocks the host until everything submitted has come over the network, or has failed: called before an optimizer's
 * step, it keeps a fault from changing parameters. finite: 0 when any rank saw an Inf or NaN. */
PACELINE_API paceline_code paceline_cuda_wait_arrival(paceline_cuda* cuda, double timeout_s,
                                                      int32_t* finite);
/* The same for one operation and all that were submitted before it: what is enqueued after it on a stream that has joined
 * the operation does not run on what a fault left half received. timeout_s as above: of the whole wait, the node's part
 * included, which may be repeated; 0 is without a limit of its own, for operations have deadlines. finite: 0 when any rank
 * saw an Inf or NaN since the last call of either that ended well. */
PACELINE_API paceline_code paceline_cuda_wait_operation(paceline_cuda* cuda, paceline_op op,
                                                        double timeout_s, int32_t* finite);
/* After a wait that said finite = 0: writes at most `capacity` of the operations whose numbers were not, which are forgotten
 * with that; returns how many. Of very many (over 4,096 since the last call) some are not told. */
PACELINE_API uint64_t paceline_cuda_not_finite(paceline_cuda* cuda, paceline_op* ops,
                                               uint64_t capacity);
/* 1 when paceline_cuda_wait_operation() would return at once (also with a failure), else 0. */
PACELINE_API int paceline_cuda_arrived(paceline_cuda* cuda, paceline_op op);
/* Instead of waiting: the device address of a float that is 0, and that becomes 1 where a fault comes before all that was
 * submitted so far has arrived, before any stream that joined it goes on. Kernels that do nothing where they read 1 there
 * (torch's fused optimizers call it found_inf) may be enqueued behind the joins at once. It stands for these operations
 * until the eighth call after this one, and may be read until the handle is destroyed. */
PACELINE_API paceline_code paceline_cuda_gate(paceline_cuda* cuda, uint64_t* address);
/* For the thread that trains, after an optimizer's step with a gate: sleeps while the stream that it goes on to fill waits for the
 * network for long, where it would wait inside the driver at the cost of a core; until shortly before the passes before had
 * arrived, and not where that makes passes longer. Behind a join of all that was submitted; else, and when called again, it
 * returns at once. The code is the failure's, where there is one. */
PACELINE_API paceline_code paceline_cuda_rest(paceline_cuda* cuda);
/* Ends everything: flags are released, communicators inside the node aborted, other ranks told. */
PACELINE_API paceline_code paceline_cuda_abort(paceline_cuda* cuda, const char* reason);
PACELINE_API paceline_code paceline_cuda_destroy(paceline_cuda* cuda);
PACELINE_API const char* paceline_cuda_describe(
    const paceline_cuda* cuda); /* the path, for the start-up line */
PACELINE_API const char* paceline_cuda_error(
    const paceline_cuda* cuda); /* NULL: of the calling thread */
PACELINE_API paceline_code paceline_cuda_stats_get(const paceline_cuda* cuda,
                                                   paceline_cuda_stats* stats);

/* Residuals of one step are kept (commit) or return to their values before it (rollback); a new loss scale
 * multiplies them (scale): of these keys, or all where they are NULL. Call after wait_arrival; see comm.h. A write of no
 * elements forgets the parameter. The velocities of momentum-corrected top-k lie beside the residuals and share their steps;
 * a parameter without any reads as 0. */
PACELINE_API paceline_code paceline_cuda_residual_commit(paceline_cuda* cuda, const uint64_t* keys,
                                                         uint64_t count);
PACELINE_API paceline_code paceline_cuda_residual_rollback(paceline_cuda* cuda,
                                                           const uint64_t* keys, uint64_t count);
PACELINE_API paceline_code paceline_cuda_residual_scale(paceline_cuda* cuda, double factor,
                                                        const uint64_t* keys, uint64_t count);
PACELINE_API paceline_code paceline_cuda_residual_read(paceline_cuda* cuda, uint64_t key,
                                                       float* data, uint64_t elements);
PACELINE_API paceline_code paceline_cuda_residual_write(paceline_cuda* cuda, uint64_t key,
                                                        const float* data, uint64_t elements);
PACELINE_API paceline_code paceline_cuda_velocity_read(paceline_cuda* cuda, uint64_t key,
                                                       float* data, uint64_t elements);
PACELINE_API paceline_code paceline_cuda_velocity_write(paceline_cuda* cuda, uint64_t key,
                                                        const float* data, uint64_t elements);

#ifdef __cplusplus
}
#endif
#endif /* PACELINE_CUDA_H */
