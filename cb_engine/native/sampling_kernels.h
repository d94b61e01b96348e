// Drawing a token from a row of logits, written once and compiled per instruction set. Included by isa_*.cpp only.
//
// Two passes over a row, block by block; a block is small enough to stay in the first-level cache:
//
//     1. the best token, and whether there is anything that is no number
//     2. weights exp((x - best) / temperature), summed per block
//
// and then the block and the token in which the running sum passes `uniform * total`. A row's result depends on
// nothing but the row.
#pragma once

#include "elements.h"

namespace {

using cb_engine::DrawJob;

constexpr int64_t kDrawBlock = 1024;  // tokens whose weights are summed before they join the row's sum

template <class E>
CB_INLINE Vec logits_at(const Storage<E>* row, int64_t at, int64_t vocab) {
  if (at + kLanes <= vocab) return E::widen(row + at);
  Storage<E> room[kLanes] = {};
  memcpy(room, row + at, static_cast<size_t>(vocab - at) * sizeof(Storage<E>));
  return keep_lanes(E::widen(room), 0, static_cast<int>(vocab - at), -__builtin_inff());
}

// The largest logit, or NaN if one of them is NaN or infinite.
template <class E>
static float largest(const Storage<E>* row, int64_t vocab) {
  const Vec infinity = splat(__builtin_inff()), one = splat(1.0f);
  Vec best = splat(-__builtin_inff()), bad = splat(0.0f);
  for (int64_t at = 0; at < vocab; at += kLanes) {
    const Vec x = logits_at<E>(row, at, vocab);
    bad = if_less(x, infinity, bad, one);
    best = vmax(x, best);
  }
  return sum_lanes(bad) > 0.0f ? __builtin_nanf("") : max_lanes(best);
}

template <class E>
static int64_t first_equal(const Storage<E>* row, int64_t vocab, float value) {
  for (int64_t at = 0; at < vocab; at += kLanes) {
    const Vec x = logits_at<E>(row, at, vocab);
    if (max_lanes(x) != value) continue;
    float lanes[kLanes];
    store(lanes, x);
    for (int i = 0; i < kLanes; ++i) {
      if (lanes[i] == value) return at + i;
    }
  }
  return 0;
}

struct Weights {
  Vec peak, temperature;

  Vec operator()(Vec x) const { return exp2_lanes(mul(div(sub(x, peak), temperature), splat(kLog2E))); }
};

template <class E>
static double block_sum(const Storage<E>* row, int64_t begin, int64_t vocab, const Weights& weights) {
  const int64_t end = begin + kDrawBlock < vocab ? begin + kDrawBlock : vocab;
  Vec sum = splat(0.0f);
  for (int64_t at = begin; at < end; at += kLanes) sum = add(sum, weights(logits_at<E>(row, at, vocab)));
  return static_cast<double>(sum_lanes(sum));
}

// The token of a block in which the running sum passes `target`; the last one that has a weight if none does.
template <class E>
static int64_t token_in_block(const Storage<E>* row, int64_t begin, int64_t vocab, const Weights& weights,
                              double target) {
  const int64_t end = begin + kDrawBlock < vocab ? begin + kDrawBlock : vocab;
  int64_t last = begin;
  double sum = 0.0;
  for (int64_t at = begin; at < end; at += kLanes) {
    float lanes[kLanes];
    store(lanes, weights(logits_at<E>(row, at, vocab)));
    for (int i = 0; i < kLanes; ++i) {
      if (lanes[i] == 0.0f) continue;
      last = at + i;
      sum += static_cast<double>(lanes[i]);
      if (sum > target) return last;
    }
  }
  return last;
}

template <class E>
static void draw(const DrawJob& job, int64_t row_begin, int64_t row_end, double* block_sums) {
  for (int64_t r = row_begin; r < row_end; ++r) {
    const Storage<E>* row = static_cast<const Storage<E>*>(job.logits) + r * job.row_stride;
    const float peak = largest<E>(row, job.vocab);
    job.token_ids[r] = 0;
    job.sums[r] = 1.0f;
    job.failed[r] = !(peak > -__builtin_inff());  // NaN, or not a single token left
    if (job.failed[r]) continue;
    if (job.temperature[r] == 0.0f) {
      job.token_ids[r] = first_equal<E>(row, job.vocab, peak);
      continue;
    }
    const Weights weights{splat(peak), splat(job.temperature[r])};
    double total = 0.0;
    int64_t blocks = 0;
    for (int64_t at = 0; at < job.vocab; at += kDrawBlock) {
      total += block_sums[blocks++] = block_sum<E>(row, at, job.vocab, weights);
    }
    double target = job.uniform[r] * total;
    int64_t block = 0, chosen = 0;
    for (; block < blocks; ++block) {
      if (block_sums[block] > 0.0) chosen = block;  // rounding may carry the target past the last one with a weight
      if (target < block_sums[block]) break;
      target -= block_sums[block];
    }
    job.token_ids[r] = token_in_block<E>(row, chosen * kDrawBlock, job.vocab, weights,
                                         block < blocks ? target : block_sums[chosen]);
    job.sums[r] = static_cast<float>(total);
  }
}

template <class E>
constexpr cb_engine::SamplingKernels sampling_kernels_of() {
  return {kDrawBlock, draw<E>};
}

}  // namespace
