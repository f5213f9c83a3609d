/* The C ABI of Paceline's communicator: the only door for frameworks.
 *
 * Conventions
 * - Every struct begins with its size in bytes (struct_size), so that older callers keep working.
 * - Functions return a paceline_code (0 is success). The sentence that explains the calling thread's
 * last failure on a handle is paceline_error(comm), until a call of the thread on that handle
 * succeeds, whatever it does with others; paceline_error(NULL) is of its last call, on any handle or
 * on none (paceline_comm_create and paceline_comm_destroy have none).
 * - Buffers belong to the caller and must stay valid (inputs: unchanged; outputs: untouched) until
 * the operation has ended.
 * - Functions on one communicator may be called from several threads; operations of one group must
 * be submitted in the same order on all its ranks, so threads that share a group have to order
 * their submissions.
 * - No callback runs under a lock of this library.
 * - After fork() the child must not use handles of the parent; every function then returns
 *   PACELINE_UNSUPPORTED (create a new communicator instead).
 */
#ifndef PACELINE_COMM_H
#define PACELINE_COMM_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define PACELINE_API __attribute__((visibility("default")))
#else
#define PACELINE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define PACELINE_ABI_VERSION 2

typedef struct paceline_comm paceline_comm;
typedef uint64_t paceline_op; /* an operation of one communicator; 0 is none */
typedef int paceline_code;

enum {
  PACELINE_OK = 0,
  PACELINE_INVALID_ARGUMENT = 1,
  PACELINE_MISMATCH = 2,
  PACELINE_TIMEOUT = 3,
  PACELINE_PEER_LOST = 4,
  PACELINE_ABORTED = 5,
  PACELINE_UNAUTHENTICATED = 6,
  PACELINE_UNAVAILABLE = 7,
  PACELINE_RESOURCE_EXHAUSTED = 8,
  PACELINE_UNSUPPORTED = 9,
  PACELINE_CORRUPTED = 10,
  PACELINE_INTERNAL = 11
};

/* dtypes: 0 float32, 1 float64, 2 float16, 3 bfloat16, 4 int8, 5 int16, 6 int32, 7 int64, 8 uint8,
 * 9 bool */
/* reduce ops: 0 sum, 1 average, 2 min, 3 max, 4 product */
/* collectives: 0 all-reduce, 1 broadcast, 2 all-gather, 3 reduce-scatter, 4 all-to-all, 5 barrier,
 * 6 reduce, 7 gather, 8 scatter */
/* algorithms: 0 auto, 1 ring, 2 recursive doubling, 3 tree, 4 direct, 5 two-level, 6 sparse */
/* codecs: 0 none, 1 fp16, 2 bf16, 3 top-k, -1 what the settings say */

/* A key-value store that every rank of the job can reach, for bootstrap. Called from the thread
 * that calls paceline_comm_create only. */
typedef struct paceline_store {
  size_t struct_size;
  void* context;
  /* Returns 0, or non-zero on failure. */
  int (*put)(void* context, const char* key, const char* value, size_t bytes);
  /* Returns the value's size (copying at most `capacity` bytes), -1 when the key is not there yet,
   * -2 on failure. */
  long (*get)(void* context, const char* key, char* value, size_t capacity);
} paceline_store;

typedef struct paceline_comm_options {
  size_t struct_size;
  int32_t rank;                /* -1: found out from the launcher's environment */
  int32_t size;                /* -1: the same */
  const char* store_prefix;    /* distinguishes communicators of one job; NULL: "" */
  const paceline_store* store; /* NULL: the launcher's */
  const char*
      face; /* "paceline", "perseus", "tiacc_training", "light", "horovod": settings' family */
  double timeout_s; /* for all ranks to come, and of operations; 0: the settings' */
  /* Who this process is in the whole job, for messages; read while it is created. NULL: what its launcher says of a job
   * of at least `size` ranks, else `rank`, which for a communicator of some of the job's ranks may be another. */
  const int32_t* job_rank;
  /* Of operations that give none of their own. 0: timeout_s, or the settings'. */
  double operation_timeout_s;
} paceline_comm_options;

typedef struct paceline_identity {
  size_t struct_size;
  int32_t rank, size, local_rank, local_size, node, node_count;
  int32_t
      job_local_size; /* ranks of the whole job on this node, as far as its launcher tells: at least local_size */
} paceline_identity;

typedef struct paceline_segment {
  uint64_t key;    /* the parameter */
  uint64_t offset; /* first element within it */
  uint64_t elements;
} paceline_segment;

/* Called once when an operation that was submitted with it has ended, which releases the operation: on the thread that
 * drives the communicator, at the latest while that is being destroyed. The thread carries all other operations: the call
 * must be short, may submit, and must not wait for any. paceline_op_error() has the sentence. */
typedef void (*paceline_notify_fn)(void* context, paceline_op op, paceline_code code);

typedef struct paceline_op_args {
  size_t struct_size;
  int32_t collective;
  int32_t dtype;
  int32_t reduce_op;
  int32_t root; /* in group numbering */
  uint32_t group;
  int32_t algorithm;
  int32_t codec;       /* -1: what the settings say */
  int32_t fp16_values; /* top-k: -1 settings, 0, 1 */
  double ratio;        /* top-k: 0 is what the settings say */
  const void* input;
  void* output;
  uint64_t count; /* elements of this rank's input (all-reduce, broadcast, reduce: of the buffer) */
  const uint64_t* counts; /* all-gather, reduce-scatter, gather, scatter: [group size] elements per
                             rank, NULL: `count` on every rank; other collectives don't look at it */
  const uint64_t* send_counts;      /* all-to-all: [group size] */
  const uint64_t* receive_counts;   /* all-to-all: [group size] */
  const paceline_segment* segments; /* top-k: which parameters the buffer holds */
  size_t segment_count;
  const char* name;  /* for messages */
  const char* shape; /* for messages */
  double timeout_s;  /* 0: the communicator's */
  /* Not 0: begins once the operations with a window that have begun and not ended hold fewer bytes of input than
   * this. What is submitted first then arrives first, where otherwise all share the link. */
  uint64_t window_bytes;
  paceline_notify_fn notify; /* NULL: who submitted waits, or watches (paceline_run: not used) */
  void* context;             /* handed to it */
} paceline_op_args;

typedef struct paceline_transfer_args {
  size_t struct_size;
  uint32_t group;
  int32_t peer;
  uint32_t tag;
  void* data;
  uint64_t bytes;
  const char* name;
  double timeout_s;
  int32_t
      any_length; /* 1, on both sides: a receive takes at most `bytes`; what arrives says how long it is */
  paceline_notify_fn notify; /* NULL: who submitted waits, or watches */
  void* context;             /* handed to it */
  const char*
      shape; /* "float32 [2, 3]": where the sides' differ both get an error with the two; NULL on both sides: the length counts */
} paceline_transfer_args;

typedef struct paceline_result {
  size_t struct_size;
  paceline_op op;
  int32_t code;
  int32_t finite; /* 0: top-k saw an Inf or NaN on some rank */
} paceline_result;

typedef struct paceline_stats {
  size_t struct_size;
  uint64_t operations;
  uint64_t payload_sent, payload_received;
  uint64_t wire_sent, wire_received;
  uint64_t predicted_link_bytes; /* of this node's link, its busier direction */
  uint64_t plans_built, plans_reused;
  uint64_t scratch_bytes, residual_bytes;
} paceline_stats;

PACELINE_API uint32_t paceline_abi_version(void);
PACELINE_API const char* paceline_version(void); /* "0.1.0" */
PACELINE_API const char* paceline_code_name(paceline_code code);

/* Blocks until all ranks are there or the time-out has passed. */
PACELINE_API paceline_code paceline_comm_create(const paceline_comm_options* options,
                                                paceline_comm** comm);
/* A communicator beside `comm`: the same ranks, settings, secret and time-out, but connections and a thread of its own.
 * Collective over the ranks of `comm`, which carries what they must tell each other to meet; a failure on one rank ends
 * `comm` on all. It is used and destroyed like any other, before `comm`, whose statistics count its bytes too. */
PACELINE_API paceline_code paceline_comm_companion(paceline_comm* comm, paceline_comm** companion);
/* Orderly end: waits (at most the time-out) until every rank has called it, then frees the handle. Operations that still
 * run two seconds later are aborted on all ranks, and the code and sentence are theirs: no buffer is touched after it.
 * Other threads may be in paceline_wait_any() and paceline_wait() of this communicator, and nowhere else. */
PACELINE_API paceline_code paceline_comm_destroy(paceline_comm* comm);
/* Ends all operations here and on all ranks with `reason`; returns at once. */
PACELINE_API paceline_code paceline_comm_abort(paceline_comm* comm, const char* reason);
/* The same under another code (not PACELINE_OK): by what this rank lacks the others know what they can do without it. */
PACELINE_API paceline_code paceline_comm_abort_as(paceline_comm* comm, paceline_code code,
                                                  const char* reason);
/* The same with a failure that was met elsewhere: `code` (not PACELINE_OK) and `sentence` reach all ranks as they are,
 * and this rank is not named as its cause. What ends one of several communicators of the same ranks ends the others so. */
PACELINE_API paceline_code paceline_comm_fail(paceline_comm* comm, paceline_code code,
                                              const char* sentence);
PACELINE_API paceline_code paceline_comm_health(paceline_comm* comm);
/* Says why this rank may not submit for a while what it will submit: `why` goes on with "rank 3 " ("waits for its GPU") and
 * stays valid and unchanged until the handle is freed; NULL: no longer. At a deadline the others then do not take this rank
 * for the one that is late, unless they find nobody else. Any thread, at the cost of a store. */
PACELINE_API paceline_code paceline_comm_hold(paceline_comm* comm, const char* why);
/* Of its node's link this communicator takes `parts` times the even part that PACELINE_LINK_RATE gives it: 1 at first, and
 * again whenever a companion comes or goes; more than 0. Whoever deals them, to all ranks of the node and their companions,
 * sees to it that they add up to their number. Without PACELINE_LINK_RATE, and in a job of one node, without effect. Any
 * thread, at the cost of a store. */
PACELINE_API paceline_code paceline_comm_weigh(paceline_comm* comm, double parts);
PACELINE_API paceline_code paceline_comm_identity(const paceline_comm* comm,
                                                  paceline_identity* identity);
/* "4 ranks × ... " the start-up line; valid until the handle is freed. */
PACELINE_API const char* paceline_comm_describe(const paceline_comm* comm);
/* The last failure's sentence; valid until the next call on the handle (NULL: of any function) by the same thread. */
PACELINE_API const char* paceline_error(const paceline_comm* comm);
PACELINE_API paceline_code paceline_comm_stats(const paceline_comm* comm, paceline_stats* stats);

/* Groups. All members call in the same order. */
PACELINE_API paceline_code paceline_group_create(paceline_comm* comm, const int32_t* ranks,
                                                 size_t count, uint32_t* group);
PACELINE_API paceline_code paceline_group_destroy(paceline_comm* comm, uint32_t group);

/* Submits; returns at once. */
PACELINE_API paceline_code paceline_submit(paceline_comm* comm, const paceline_op_args* args,
                                           paceline_op* op);
PACELINE_API paceline_code paceline_send(paceline_comm* comm, const paceline_transfer_args* args,
                                         paceline_op* op);
PACELINE_API paceline_code paceline_receive(paceline_comm* comm, const paceline_transfer_args* args,
                                            paceline_op* op);
/* Submits and waits, on the calling thread where that is faster (small operations). */
PACELINE_API paceline_code paceline_run(paceline_comm* comm, const paceline_op_args* args,
                                        paceline_result* result);
/* 1 when the operation has ended (its result is kept), 0 while it runs. */
PACELINE_API int paceline_test(paceline_comm* comm, paceline_op op);
/* Waits and releases the operation. timeout_s < 0: until its own deadline. */
PACELINE_API paceline_code paceline_wait(paceline_comm* comm, paceline_op op, double timeout_s,
                                         paceline_result* result);
/* For a thread that computes what it submits (a backward pass), after the first operation of a step: while all cores of
 * the machine are busy, and a rank of this node has not reached `op`, the thread sleeps and its core goes to those that
 * are behind, on whom the network waits; at most for timeout_s. 1: all ranks of the node have reached it. */
PACELINE_API int paceline_give_way(paceline_comm* comm, paceline_op op, double timeout_s);
/* For a thread that serves completions: blocks until some operations submitted with
 * paceline_watch() have ended (at most timeout_s), writes and releases up to `capacity` results,
 * returns how many; -1 once the communicator is being destroyed. */
PACELINE_API int paceline_wait_any(paceline_comm* comm, double timeout_s, paceline_result* results,
                                   int capacity);
/* Hands the operation's completion to paceline_wait_any(). */
PACELINE_API paceline_code paceline_watch(paceline_comm* comm, paceline_op op);
/* The sentence of an ended operation, by code and handle, copied out. Returns its length. */
PACELINE_API size_t paceline_op_error(paceline_comm* comm, paceline_op op, char* text,
                                      size_t capacity);

/* Buckets of other sizes follow: memory that is kept for operations of the former sizes is freed. Scratch would be by itself,
 * once some hundred operations have been smaller; what top-k works with only here and when a communicator ends. */
PACELINE_API paceline_code paceline_trim(paceline_comm* comm);

/* Residuals of top-k; see src/engine/engine.h. What was written since the last of the two calls is kept (commit) or returns
 * to its values before (rollback): of `count` parameters, told by the keys of their segments, while operations on others may
 * be under way; of all where keys is NULL. */
PACELINE_API paceline_code paceline_residual_commit(paceline_comm* comm, const uint64_t* keys,
                                                    uint64_t count);
PACELINE_API paceline_code paceline_residual_rollback(paceline_comm* comm, const uint64_t* keys,
                                                      uint64_t count);
PACELINE_API paceline_code paceline_residual_scale(paceline_comm* comm, double factor);
/* A write of no elements forgets the parameter and frees its memory. */
PACELINE_API paceline_code paceline_residual_read(paceline_comm* comm, uint64_t key, float* data,
                                                  uint64_t elements);
PACELINE_API paceline_code paceline_residual_write(paceline_comm* comm, uint64_t key,
                                                   const float* data, uint64_t elements);

/* Memory that ranks of one node can read and write in place: a copy less per collective, two where ranks of one node
 * alone sum up. NULL: paceline_error(comm). */
PACELINE_API void* paceline_alloc(paceline_comm* comm, size_t bytes);
PACELINE_API void paceline_free(paceline_comm* comm, void* memory);
/* The same for memory that the caller has: its whole pages are exchanged for shared ones, with what they hold, at the
 * addresses they have. `data`: private, writable memory (malloc's, say), which nobody touches during the call, and which must
 * not be given back before paceline_unshare() of the same address or paceline_comm_destroy(), which make its pages private
 * again. No operation on it may be under way then. A process that this one forks keeps what it writes to it to itself, as with
 * other memory; pages that it has not written to may show it what is written to them here, and zeros once they are private
 * again here. (What paceline_alloc() gives is the same memory in both.)
 * PACELINE_INVALID_ARGUMENT: no whole page, shared already, not shared; PACELINE_RESOURCE_EXHAUSTED: no shared memory, the
 * memory stays as it is. Without other ranks on the node both do nothing. */
PACELINE_API paceline_code paceline_share(paceline_comm* comm, void* data, size_t bytes);
PACELINE_API paceline_code paceline_unshare(paceline_comm* comm, void* data);

/* What scripts for torch's launcher expect (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
 * MASTER_PORT), from whatever launcher there is: one NAME=VALUE a line, ended by a zero; empty where they are set
 * already or nothing started this process. Under mpirun collective: every rank calls it once. */
PACELINE_API paceline_code paceline_launch_environment(const char* face, char* text,
                                                       size_t capacity);

/* The settings table as JSON (name, aliases, type, range, default, value, source, text). Returns
 * the length; writes at most `capacity` bytes. face: see paceline_comm_options. */
PACELINE_API size_t paceline_settings_json(const char* face, char* text, size_t capacity);
/* Checks the environment. Non-zero: the sentence is paceline_error(NULL). Warnings (known but not
 * built) are written to `warnings`, one a line. */
PACELINE_API paceline_code paceline_settings_check(const char* face, char* warnings,
                                                   size_t capacity);
/* The same, and says the warnings as paceline_comm_create() does: where job_rank is 0, each once a process. For who makes
 * no communicator (a job of one rank), so that its settings are looked at all the same. */
PACELINE_API paceline_code paceline_settings_warn(const char* face, int32_t job_rank);
/* The value of one setting by canonical name, as text. Returns its length, or 0 when there is no
 * such setting. */
PACELINE_API size_t paceline_setting(const char* face, const char* name, char* text,
                                     size_t capacity);

#ifdef __cplusplus
}
#endif
#endif /* PACELINE_COMM_H */
