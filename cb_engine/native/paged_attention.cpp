// The operator `cb_engine::paged_attention`: checks its tensors, cuts the step into units of work, and has torch's
// thread pool run them.
//
// Owns: argument checks and work splitting. Does not know: arithmetic (attention_kernels.h).

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "dispatch.h"
#include "operators.h"

namespace cb_engine {

namespace {

// ------------------------------------------------------------------------------------------ arguments

void check_packed(const at::Tensor& x, const char* name, const at::Tensor& like) {
  TORCH_CHECK_VALUE(x.dim() == 3 && x.device().is_cpu() && x.scalar_type() == like.scalar_type(), name,
                    " must be a 3-d CPU tensor of the query's dtype");
  TORCH_CHECK_VALUE(x.size(0) == like.size(0) && x.size(2) == like.size(2), name, " must be [",
                    like.size(0), ", *, ", like.size(2), "], got ", x.sizes());
  TORCH_CHECK_VALUE(x.size(2) == 1 || x.stride(2) == 1, name, " must be contiguous along its last axis");
}

void check_index(const at::Tensor& x, const char* name, at::ScalarType dtype, int64_t dim) {
  TORCH_CHECK_VALUE(x.dim() == dim && x.device().is_cpu() && x.scalar_type() == dtype, name, " must be a ", dim,
                    "-d CPU tensor of ", dtype);
  TORCH_CHECK_VALUE(x.numel() == 0 || x.size(-1) <= 1 || x.stride(-1) == 1, name,
                    " must be contiguous along its last axis");
}

// Fills in the AttentionJob from the tensors. See kernel_api.h for the cache layouts.
AttentionJob make_job(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& k_cache,
             const at::Tensor& v_cache, const at::Tensor& slot_mapping, const at::Tensor& block_table,
             const at::Tensor& output, int64_t pair) {
  const int64_t head_dim = query.size(2), heads = query.size(1), kv_heads = key.size(1);
  TORCH_CHECK_VALUE(kv_heads > 0 && heads % kv_heads == 0, "num_heads ", heads, " is no multiple of num_kv_heads ",
                    kv_heads);
  TORCH_CHECK_VALUE(value.size(1) == kv_heads, "key and value differ in their number of heads");
  TORCH_CHECK_VALUE(slot_mapping.size(0) == query.size(0), "slot_mapping needs one slot per token");
  const int64_t key_pairs = (head_dim + pair - 1) / pair, value_dim = (head_dim + kLanes - 1) / kLanes * kLanes;
  TORCH_CHECK_VALUE(
      k_cache.dim() == 6 && k_cache.size(1) == kv_heads && k_cache.size(3) == key_pairs && k_cache.size(5) == pair &&
          k_cache.scalar_type() == query.scalar_type() && k_cache.device().is_cpu() && k_cache.is_contiguous(),
      "k_cache does not fit the query; allocate it with NativeBackend.allocate, got ", k_cache.sizes());
  const int64_t block_size = k_cache.size(2) * k_cache.size(4);
  TORCH_CHECK_VALUE(v_cache.dim() == 5 && v_cache.size(0) == k_cache.size(0) && v_cache.size(1) == kv_heads &&
                        v_cache.size(2) == (block_size + pair - 1) / pair && v_cache.size(3) == value_dim &&
                        v_cache.size(4) == pair && v_cache.scalar_type() == query.scalar_type() &&
                        v_cache.device().is_cpu() && v_cache.is_contiguous(),
                    "v_cache does not fit k_cache; allocate it with NativeBackend.allocate, got ", v_cache.sizes());
  AttentionJob job{};
  job.query = query.const_data_ptr();
  job.key = key.const_data_ptr();
  job.value = value.const_data_ptr();
  job.output = output.mutable_data_ptr();
  job.k_cache = k_cache.mutable_data_ptr();
  job.v_cache = v_cache.mutable_data_ptr();
  job.slot_mapping = slot_mapping.const_data_ptr<int64_t>();
  job.block_table = block_table.const_data_ptr<int32_t>();
  for (int i = 0; i < 2; ++i) {
    job.query_stride[i] = query.stride(i);
    job.key_stride[i] = key.stride(i);
    job.value_stride[i] = value.stride(i);
  }
  job.k_block_stride = k_cache.stride(0);
  job.k_head_stride = k_cache.stride(1);
  job.v_block_stride = v_cache.stride(0);
  job.v_head_stride = v_cache.stride(1);
  job.table_stride = block_table.stride(0);
  job.num_blocks = k_cache.size(0);
  job.block_size = block_size;
  job.num_heads = static_cast<int32_t>(heads);
  job.num_kv_heads = static_cast<int32_t>(kv_heads);
  job.head_dim = static_cast<int32_t>(head_dim);
  return job;
}

// ------------------------------------------------------------------------------------------ cutting the work

constexpr int64_t kRowsPerUnit = 96;  // keeps a unit's queries and accumulators in L1 and L2
constexpr int64_t kUnitsPerThread = 4;
constexpr int64_t kCostPerThread = 512;  // some microseconds: less is not worth waking a thread for

struct Plan {
  std::vector<Unit> units;   // run in any order by any thread
  std::vector<Unit> merges;  // split units: `partial` is the first of their partial states
  std::vector<int64_t> merge_counts;
  std::unique_ptr<float[]> partials;
};

int64_t num_pieces(const Unit& unit) {
  return unit.key_begin < unit.key_end ? (unit.key_end - 1) / kPiece - unit.key_begin / kPiece + 1 : 0;
}

void zero_rows(const at::Tensor& output, int64_t begin, int64_t end) {
  const int64_t row = output.stride(0) * output.element_size();
  if (begin < end) memset(static_cast<char*>(output.mutable_data_ptr()) + begin * row, 0, (end - begin) * row);
}

// One unit per (request, kv head, run of query tokens), long contexts first; rows of padding are zeroed at once.
void make_units(const AttentionJob& job, const at::Tensor& query_start_loc, const at::Tensor& seq_lens, int64_t table_width,
                const at::Tensor& output, std::vector<Unit>& units) {
  const int32_t* starts = query_start_loc.const_data_ptr<int32_t>();
  const int32_t* lens = seq_lens.const_data_ptr<int32_t>();
  const int64_t num_requests = seq_lens.size(0), num_tokens = output.size(0);
  std::vector<int32_t> order;
  order.reserve(num_requests);
  TORCH_CHECK_VALUE(starts[0] == 0, "query_start_loc must start with 0");
  for (int64_t i = 0; i < num_requests; ++i) {
    TORCH_CHECK_VALUE(starts[i] <= starts[i + 1] && starts[i + 1] <= num_tokens,
                      "query_start_loc must not decrease nor exceed the ", num_tokens, " tokens of the query");
    TORCH_CHECK_VALUE(lens[i] <= table_width * job.block_size, "request ", i, " has ", lens[i],
                      " tokens, more than its ", table_width, " blocks hold");
    if (lens[i] > 0 && starts[i] < starts[i + 1]) {
      order.push_back(static_cast<int32_t>(i));
    } else {
      zero_rows(output, starts[i], starts[i + 1]);
    }
  }
  zero_rows(output, starts[num_requests], num_tokens);
  std::sort(order.begin(), order.end(),
            [&](int32_t a, int32_t b) { return lens[a] != lens[b] ? lens[a] > lens[b] : a < b; });

  for (const int32_t request : order) {
    const int64_t first = starts[request], past = lens[request] - (starts[request + 1] - first);
    for (int64_t end = starts[request + 1]; end > first;) {
      const int64_t begin = first + (end - first - 1) / job.max_unit_tokens * job.max_unit_tokens;
      const int64_t first_position = past + begin - first, last_position = past + end - 1 - first;
      const int64_t key_begin = job.window > 0 ? std::max<int64_t>(0, first_position - job.window + 1) : 0;
      for (int32_t head = 0; head < job.num_kv_heads; ++head) {
        units.push_back({request, head, begin, static_cast<int32_t>(end - begin), first_position, key_begin,
                         std::max(key_begin, last_position + 1), nullptr});
      }
      end = begin;
    }
  }
}

// Keys times tokens. Right for prefill; for decode, where reading the keys is the cost, too small but equal for all.
int64_t cost_of(const Unit& unit) { return unit.num_tokens * (unit.key_end - unit.key_begin); }

// Cuts units whose length would leave threads idle into pieces of the keys. Results do not depend on whether one is
// cut (attention_kernels.h, "the same bits"), so this may follow the number of threads.
void split_units(const AttentionJob& job, const AttentionKernels& kernels, int64_t total_cost, int64_t threads, Plan& plan) {
  const int64_t limit = threads > 1 ? total_cost / (threads * kUnitsPerThread) : total_cost;
  const auto splits = [&](const Unit& u) { return cost_of(u) > limit && num_pieces(u) > 1; };

  int64_t floats = 0;
  for (const Unit& unit : plan.units) {
    if (splits(unit)) floats += num_pieces(unit) * kernels.partial_floats(job, unit.num_tokens);
  }
  if (floats == 0) return;
  plan.partials.reset(new float[floats]);
  float* partial = plan.partials.get();
  std::vector<Unit> units;
  units.reserve(2 * plan.units.size());
  for (const Unit& unit : plan.units) {
    if (!splits(unit)) {
      units.push_back(unit);
      continue;
    }
    const int64_t pieces = num_pieces(unit), size = kernels.partial_floats(job, unit.num_tokens);
    plan.merges.push_back(unit);
    plan.merges.back().partial = partial;
    plan.merge_counts.push_back(pieces);
    for (int64_t i = unit.key_begin / kPiece; i <= (unit.key_end - 1) / kPiece; ++i, partial += size) {
      Unit piece = unit;
      piece.key_begin = std::max(unit.key_begin, i * kPiece);
      piece.key_end = std::min(unit.key_end, (i + 1) * kPiece);
      piece.partial = partial;
      units.push_back(piece);
    }
  }
  plan.units = std::move(units);
}

// ------------------------------------------------------------------------------------------ running

// Scratch memory of a thread, grown and kept: a step calls this operator once a layer.
char* thread_scratch(int64_t bytes) {
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<char, Free> memory;
  thread_local int64_t size = 0;
  if (size < bytes) {
    size = (bytes + 4095) / 4096 * 4096;
    memory.reset(static_cast<char*>(std::aligned_alloc(64, size)));
    TORCH_CHECK(memory != nullptr, "out of memory for ", size, " bytes of attention scratch");
  }
  return memory.get();
}

// Whether no request has more than one token: then its units are alone in reading what they write.
bool has_single_tokens(const at::Tensor& query_start_loc) {
  const int32_t* starts = query_start_loc.const_data_ptr<int32_t>();
  return std::adjacent_find(starts, starts + query_start_loc.size(0),
                            [](int32_t a, int32_t b) { return b - a > 1; }) == starts + query_start_loc.size(0);
}

void check_slots(const AttentionJob& job, int64_t num_tokens) {
  const int64_t end = job.num_blocks * job.block_size;
  for (int64_t i = 0; i < num_tokens; ++i) {
    TORCH_CHECK_INDEX(job.slot_mapping[i] >= 0 && job.slot_mapping[i] < end,
                      "slot_mapping points outside the cache of ", job.num_blocks, " blocks");
  }
}

void write_cache(const AttentionJob& job, const AttentionKernels& kernels, int64_t num_tokens) {
  const int64_t grain = std::max<int64_t>(1, 256 / job.num_kv_heads);  // less is not worth waking a thread
  at::parallel_for(0, num_tokens, grain, [&](int64_t begin, int64_t end) {
    kernels.write(job, begin, end, 0, job.num_kv_heads);
  });
}

bool run_units(const AttentionJob& job, const AttentionKernels& kernels, const Plan& plan, int64_t threads) {
  const int64_t count = static_cast<int64_t>(plan.units.size());
  const int64_t scratch = kernels.scratch_bytes(job);
  std::atomic<int64_t> taken{0};
  std::atomic<bool> valid{true};
  at::parallel_for(0, std::min(threads, count), 1, [&](int64_t, int64_t) {
    char* memory = thread_scratch(scratch);
    // A thread knows its next unit while it works on one, and prefetches its first keys.
    int64_t now = taken.fetch_add(1);
    while (now < count) {
      const int64_t then = taken.fetch_add(1);
      if (!kernels.attend(job, plan.units[now], then < count ? &plan.units[then] : nullptr, memory)) valid = false;
      now = then;
    }
  });
  // A merge is some microseconds: one request's are not worth a second round of waking threads.
  at::parallel_for(0, static_cast<int64_t>(plan.merges.size()), 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      kernels.merge(job, plan.merges[i], plan.merges[i].partial, plan.merge_counts[i]);
    }
  });
  return valid;
}

}  // namespace

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& slot_mapping,
                           const at::Tensor& block_table, const at::Tensor& query_start_loc,
                           const at::Tensor& seq_lens, double scale, int64_t window, double softcap,
                           const std::optional<at::Tensor>& sinks) {
  RECORD_FUNCTION("cb_engine::paged_attention", {});
  const AttentionKernels& kernels = kernels_for(current_kernels().attention, query.scalar_type());
  check_packed(query, "query", query);
  check_packed(key, "key", query);
  check_packed(value, "value", query);
  check_index(slot_mapping, "slot_mapping", at::kLong, 1);
  check_index(block_table, "block_table", at::kInt, 2);
  check_index(query_start_loc, "query_start_loc", at::kInt, 1);
  check_index(seq_lens, "seq_lens", at::kInt, 1);
  TORCH_CHECK_VALUE(query_start_loc.size(0) == seq_lens.size(0) + 1 && block_table.size(0) == seq_lens.size(0),
                    "block_table and query_start_loc must have one row and one row more than seq_lens");

  const at::Tensor output = at::empty(query.sizes(), query.options().memory_format(at::MemoryFormat::Contiguous));
  if (output.numel() == 0) return output;
  AttentionJob job = make_job(query, key, value, k_cache, v_cache, slot_mapping, block_table, output, kernels.pair);
  at::Tensor sink_logits;
  if (sinks.has_value()) {
    sink_logits = sinks->to(at::kFloat).contiguous();
    TORCH_CHECK_VALUE(sink_logits.dim() == 1 && sink_logits.size(0) == job.num_heads, "sinks must be [num_heads]");
    job.sinks = sink_logits.const_data_ptr<float>();
  }
  job.scale = static_cast<float>(scale);
  job.softcap = static_cast<float>(softcap);
  job.window = std::max<int64_t>(0, window);
  const int64_t group = job.num_heads / job.num_kv_heads;
  job.max_unit_tokens = static_cast<int32_t>(std::max<int64_t>(1, kRowsPerUnit / group));

  check_slots(job, query.size(0));
  job.units_write = has_single_tokens(query_start_loc);

  Plan plan;
  make_units(job, query_start_loc, seq_lens, block_table.size(1), output, plan.units);
  int64_t cost = 0;
  for (const Unit& unit : plan.units) cost += cost_of(unit);
  const int64_t threads = std::clamp<int64_t>(cost / kCostPerThread, 1, at::get_num_threads());
  split_units(job, kernels, cost, threads, plan);
  if (!job.units_write) write_cache(job, kernels, query.size(0));
  const bool blocks_valid = run_units(job, kernels, plan, threads);
  TORCH_CHECK_INDEX(blocks_valid, "block_table points outside the cache of ", job.num_blocks, " blocks");
  return output;
}

TORCH_LIBRARY_FRAGMENT(cb_engine, m) {
  m.def(
      "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor slot_mapping, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, float scale, int window, "
      "float softcap, Tensor? sinks) -> Tensor");
}

TORCH_LIBRARY_IMPL(cb_engine, CPU, m) { m.impl("paged_attention", &paged_attention); }

}  // namespace cb_engine
