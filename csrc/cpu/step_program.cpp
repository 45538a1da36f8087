// Step programs: the native calls of one forward, recorded once and replayed by one call.
//
// Each function of the C ABI becomes an op by a line in kOps. An argument is a constant, a number of rows, a place in
// the program's own memory or in what the caller gives for this run, so one program serves every batch.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#include "pagedserve.h"
#include "status.h"
#include "thread_pool.h"

using ps::fail;

namespace {

constexpr int64_t kAlignment = 64;
constexpr int kMaxArguments = 24;

// ---- from 64-bit words to a typed call --------------------------------------------------------------------------

template <class T>
T from_word(int64_t word) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(static_cast<intptr_t>(word));
  } else if constexpr (std::is_same_v<T, float>) {
    const int32_t bits = static_cast<int32_t>(word);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  } else {
    static_assert(std::is_integral_v<T>, "an op takes pointers, integers and floats");
    return static_cast<T>(word);
  }
}

using Invoke = int (*)(const int64_t* words);

struct Op {
  const char* name;
  Invoke invoke;
  int num_arguments;
};

template <auto kFunction, class... Parameters, size_t... kIndex>
int invoke_with(const int64_t* words, std::index_sequence<kIndex...>) {
  return kFunction(from_word<Parameters>(words[kIndex])...);
}

template <auto kFunction, class... Parameters>
constexpr Op make_op(const char* name, int (*)(Parameters...)) {
  static_assert(sizeof...(Parameters) <= kMaxArguments, "raise kMaxArguments");
  return {name,
          [](const int64_t* words) {
            return invoke_with<kFunction, Parameters...>(words, std::index_sequence_for<Parameters...>());
          },
          static_cast<int>(sizeof...(Parameters))};
}

#define PS_OP(function) make_op<function>(#function, function)

// What a program can call. To make an op capturable, add its line.
constexpr Op kOps[] = {
    PS_OP(ps_rms_norm),
    PS_OP(ps_rotary_embedding),
    PS_OP(ps_gated_activation),
    PS_OP(ps_write_kv),
    PS_OP(ps_paged_attention),
    PS_OP(ps_rotary_attention),
    PS_OP(ps_linear),
    PS_OP(ps_linear_rows),
    PS_OP(ps_route),
    PS_OP(ps_experts_sum),
    PS_OP(ps_ggml_rows),
    PS_OP(ps_layer_norm),
    PS_OP(ps_activation),
    PS_OP(ps_scale),
    PS_OP(ps_soft_cap),
    PS_OP(ps_add),
    PS_OP(ps_embedding),
};

const Op* find_op(const char* name) {
  for (const Op& op : kOps) {
    if (std::strcmp(op.name, name) == 0) return &op;
  }
  return nullptr;
}

// ---- the program --------------------------------------------------------------------------------------------------

struct Buffer {
  int64_t bytes;
  int64_t count_index;  // -1: a fixed size
  char* address = nullptr;
};

struct Call {
  const Op* op;
  size_t first_argument;
};

double seconds_between(std::chrono::steady_clock::time_point begin, std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace

struct ps_program {
  int64_t num_counts;
  int64_t num_inputs;
  std::vector<Buffer> buffers;
  std::vector<ps_argument> arguments;  // of all calls, one after another
  std::vector<Call> calls;
  char* memory = nullptr;
  int64_t memory_bytes = 0;

  ~ps_program() { std::free(memory); }

  // Gives every buffer its place for this run.
  bool place_buffers(const int64_t* counts) {
    int64_t needed = 0;
    for (Buffer& buffer : buffers) {
      const int64_t count = buffer.count_index < 0 ? 1 : counts[buffer.count_index];
      buffer.address = reinterpret_cast<char*>(static_cast<intptr_t>(needed));
      needed += (buffer.bytes * count + kAlignment - 1) / kAlignment * kAlignment;
    }
    if (needed > memory_bytes) {
      std::free(memory);
      const int64_t rounded = (needed + needed / 4 + 4095) / 4096 * 4096;
      memory = static_cast<char*>(std::aligned_alloc(4096, static_cast<size_t>(rounded)));
      memory_bytes = memory != nullptr ? rounded : 0;
      if (memory == nullptr) return false;
    }
    for (Buffer& buffer : buffers) buffer.address = memory + reinterpret_cast<intptr_t>(buffer.address);
    return true;
  }

  int64_t word_of(const ps_argument& argument, const int64_t* counts, void* const* inputs) const {
    switch (argument.kind) {
      case PS_ARGUMENT_COUNT: return argument.value * counts[argument.index];
      case PS_ARGUMENT_BUFFER:
        return static_cast<int64_t>(reinterpret_cast<intptr_t>(buffers[argument.index].address)) + argument.value;
      case PS_ARGUMENT_INPUT:
        return static_cast<int64_t>(reinterpret_cast<intptr_t>(inputs[argument.index])) + argument.value;
      default: return argument.value;
    }
  }

  int run(const Call& call, const int64_t* counts, void* const* inputs) const {
    int64_t words[kMaxArguments];
    const ps_argument* from = arguments.data() + call.first_argument;
    for (int i = 0; i < call.op->num_arguments; ++i) words[i] = word_of(from[i], counts, inputs);
    return call.op->invoke(words);
  }
};

namespace {

int check_argument(const ps_program& program, const ps_argument& argument) {
  const int64_t limits[] = {INT64_MAX, program.num_counts, static_cast<int64_t>(program.buffers.size()),
                            program.num_inputs};
  if (argument.kind < PS_ARGUMENT_VALUE || argument.kind > PS_ARGUMENT_INPUT) {
    return fail(PS_INVALID_ARGUMENT, "unknown kind of argument %d", argument.kind);
  }
  if (argument.index < 0 || argument.index >= limits[argument.kind]) {
    return fail(PS_INVALID_ARGUMENT, "argument of kind %d and index %d: there are %lld", argument.kind, argument.index,
                (long long)limits[argument.kind]);
  }
  return PS_OK;
}

}  // namespace

extern "C" {

int ps_program_create(ps_program** program, int64_t num_counts, int64_t num_inputs) {
  *program = new (std::nothrow) ps_program{};
  if (*program == nullptr) return fail(PS_OUT_OF_MEMORY, "no memory for a step program");
  (*program)->num_counts = num_counts;
  (*program)->num_inputs = num_inputs;
  return PS_OK;
}

void ps_program_destroy(ps_program* program) { delete program; }

int ps_program_add_buffer(ps_program* program, int64_t bytes, int64_t count_index) {
  if (bytes < 0 || count_index < -1 || count_index >= program->num_counts) {
    return fail(PS_INVALID_ARGUMENT, "a buffer of %lld bytes for count %lld of %lld", (long long)bytes,
                (long long)count_index, (long long)program->num_counts);
  }
  program->buffers.push_back({bytes, count_index});
  return PS_OK;
}

int ps_program_add_op(ps_program* program, const char* op, const ps_argument* arguments, int64_t num_arguments) {
  const Op* found = find_op(op);
  if (found == nullptr) return fail(PS_UNSUPPORTED, "%s is not in the list of step_program.cpp", op);
  if (num_arguments != found->num_arguments) {
    return fail(PS_INVALID_ARGUMENT, "%s takes %d arguments, here are %lld", op, found->num_arguments,
                (long long)num_arguments);
  }
  for (int64_t i = 0; i < num_arguments; ++i) {
    if (const int status = check_argument(*program, arguments[i])) return status;
  }
  program->calls.push_back({found, program->arguments.size()});
  program->arguments.insert(program->arguments.end(), arguments, arguments + num_arguments);
  return PS_OK;
}

int ps_program_run(ps_program* program, const int64_t* counts, void* const* inputs, double* op_seconds) {
  const ps::PoolRegion region;
  if (!program->place_buffers(counts)) return fail(PS_OUT_OF_MEMORY, "no memory for the activations of a step");
  if (op_seconds == nullptr) {
    for (const Call& call : program->calls) {
      if (const int status = program->run(call, counts, inputs)) return status;
    }
    return PS_OK;
  }
  auto last = std::chrono::steady_clock::now();
  for (const Call& call : program->calls) {
    if (const int status = program->run(call, counts, inputs)) return status;
    const auto now = std::chrono::steady_clock::now();
    *op_seconds++ += seconds_between(last, now);
    last = now;
  }
  return PS_OK;
}

}  // extern "C"
