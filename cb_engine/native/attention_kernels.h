// The attention kernels, written once and compiled per instruction set (isa_*.cpp). Included by those files only.
//
// A Unit is `rows = tokens * group` query rows (group: query heads per kv head) against a range of keys:
//
//        one tile of 64 keys
//            |<--->|                      row r = token (r / group), head (r % group)
//   panel 0  #######                      a panel is up to kPanel rows; per (tile, panel):
//   panel 1  #########                      scores = Q K^T      registers, then 1.5 KB of scratch
//   panel 2  ###########                    online softmax      in base 2
//   panel 3  #############                  O = O * alpha + P V accumulators in registers
//            causal: a panel skips what none of its rows sees
//
// K and V stay in L1 while the panels of a tile go by, so they are read once for all rows and heads. A decode step is
// the same with one panel, and the next tile is prefetched meanwhile.
//
// The same bits, however the work is cut. A row's result depends on its own query and keys only, not on the batch,
// the chunk its token came in, the number of threads, or the block size: tiles and pieces start at multiples of
// kTile and kPiece; every row does its operations in the same order whatever panel it is in; a masked key adds an
// exact zero and an all-masked tile rescales by an exact one; and the partial states of pieces are folded one after
// the other, whether one thread computes them in a row or several apart.
#pragma once

#include "elements.h"
#include "kernel_api.h"

namespace {

using cb_engine::AttentionJob;
using cb_engine::kPiece;
using cb_engine::kTile;
using cb_engine::Unit;

constexpr int kGroups = kTile / kLanes;  // vectors of keys in a tile
constexpr float kInfinity = __builtin_inff();

// Register blocking: kPanel rows by kColumns vectors of accumulators, plus the operands, must fit the register file.
#if defined(__AVX512F__)
constexpr int kPanel = 6, kColumns = 4;  // 24 of 32 registers
#elif defined(__AVX2__)
constexpr int kPanel = 4, kColumns = 1;  // 8 of 16
#else
constexpr int kPanel = 2, kColumns = 1;  // 8 of 16
#endif

CB_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
CB_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
CB_INLINE int64_t round_up(int64_t a, int64_t multiple) { return (a + multiple - 1) / multiple * multiple; }

template <class E>
struct Shape {
  int64_t group;         // query heads per kv head
  int64_t key_dim;       // head_dim rounded up to kPair
  int64_t value_dim;     // head_dim rounded up to kLanes
  int64_t tokens_wide;   // tokens side by side in K
  bool direct;           // whether 16 aligned keys are one group of K

  explicit Shape(const AttentionJob& job)
      : group(job.num_heads / job.num_kv_heads),
        key_dim(round_up(job.head_dim, E::kPair)),
        value_dim(round_up(job.head_dim, kLanes)),
        tokens_wide(job.block_size % kLanes == 0 ? kLanes : job.block_size),
        direct(job.block_size % kLanes == 0) {}

  int64_t k_index(int64_t offset) const {  // of dimension 0 of a token; the next pair is tokens_wide * kPair on
    return offset / tokens_wide * tokens_wide * key_dim + offset % tokens_wide * E::kPair;
  }
  int64_t v_index(int64_t offset) const {  // likewise; the next dimension is kPair on
    return offset / E::kPair * value_dim * E::kPair + offset % E::kPair;
  }
};

// Softmax state of the rows of a unit. Sums stay spread over the lanes until the end.
struct State {
  float* output;   // [rows, value_dim], not yet normalised
  float* sum;      // [rows, kLanes]
  float* maximum;  // [rows rounded up to kLanes], base 2

  static int64_t floats(int64_t rows, int64_t value_dim) {
    return rows * value_dim + rows * kLanes + round_up(rows, kLanes);
  }
  static State at(float* base, int64_t rows, int64_t value_dim) {
    return {base, base + rows * value_dim, base + rows * value_dim + rows * kLanes};
  }
  void clear(int64_t rows, int64_t value_dim) const {
    memset(output, 0, static_cast<size_t>(rows * value_dim) * sizeof(float));
    memset(sum, 0, static_cast<size_t>(rows * kLanes) * sizeof(float));
    for (int64_t r = 0; r < rows; ++r) maximum[r] = -kInfinity;
  }
};

// Where a tile's keys and values are.
template <class E>
struct Tile {
  const Storage<E>* k[kGroups];           // each: [key_dim / kPair][16][kPair]
  const Storage<E>* v[kTile / E::kPair];  // each: [value_dim][kPair]
};

// Scratch memory of one thread, cut up.
template <class E>
struct Scratch {
  Packed<E>* query;    // [rows, key_dim]
  float* states[2];    // of all pieces so far, and of one piece
  float* scores;       // [kPanel, kTile]
  Packed<E>* weights;  // [kPanel, kTile]
  Storage<E>* k_tile;  // [kGroups][key_dim * 16]: keys of blocks that are no multiple of 16
  Storage<E>* v_tile;  // [kTile / kPair][value_dim * kPair]: pairs that had to be put together or cleaned

  static int64_t carve(const AttentionJob& job, char* base, Scratch* out) {
    const Shape<E> shape(job);
    const int64_t rows = job.max_unit_tokens * shape.group;
    int64_t used = 0;
    const auto take = [&](int64_t bytes) {
      char* p = base + used;
      used += round_up(bytes, 64);
      return p;
    };
    Scratch s;
    s.query = reinterpret_cast<Packed<E>*>(take(rows * shape.key_dim * static_cast<int64_t>(sizeof(Packed<E>))));
    for (float*& state : s.states) {
      state = reinterpret_cast<float*>(take(State::floats(rows, shape.value_dim) * 4));
    }
    s.scores = reinterpret_cast<float*>(take(kPanel * kTile * 4));
    s.weights = reinterpret_cast<Packed<E>*>(take(kPanel * kTile * static_cast<int64_t>(sizeof(Packed<E>))));
    const int64_t element = static_cast<int64_t>(sizeof(Storage<E>));
    s.k_tile = reinterpret_cast<Storage<E>*>(take(kTile * shape.key_dim * element));
    s.v_tile = reinterpret_cast<Storage<E>*>(take(kTile * shape.value_dim * element));
    if (out != nullptr) *out = s;
    return used;
  }
};

// ---------------------------------------------------------------------------------------------- finding the keys

// The unit's view of the cache: block table row and kv head resolved.
template <class E>
struct Keys {
  const AttentionJob& job;
  const Shape<E>& shape;
  const int32_t* table;
  int64_t kv_head;
  int64_t begin, end;  // keys some row of the unit sees; nothing outside is read
  bool valid = true;

  Keys(const AttentionJob& j, const Shape<E>& s, const Unit& unit)
      : job(j),
        shape(s),
        table(j.block_table + unit.request * j.table_stride),
        kv_head(unit.kv_head),
        begin(unit.key_begin),
        end(unit.key_end) {}

  int64_t block(int64_t position) {
    const int64_t id = table[position / job.block_size];
    if (id >= 0 && id < job.num_blocks) return id;
    valid = false;
    return 0;
  }
  const Storage<E>* k_block(int64_t id) const {
    return static_cast<const Storage<E>*>(job.k_cache) + id * job.k_block_stride + kv_head * job.k_head_stride;
  }
  const Storage<E>* v_block(int64_t id) const {
    return static_cast<const Storage<E>*>(job.v_cache) + id * job.v_block_stride + kv_head * job.v_head_stride;
  }

  // Pointers to the tile that starts at `start`; entries without a key in [begin, end) repeat a valid one.
  void locate(int64_t start, Tile<E>* tile) {
    constexpr int kPairsPerGroup = kLanes / E::kPair;
    const int first = static_cast<int>((max64(begin, start) - start) / kLanes);
    const int last = static_cast<int>((min64(end, start + kTile) - start + kLanes - 1) / kLanes);
    for (int g = first; g < last; ++g) {
      const int64_t position = start + g * kLanes;
      const int64_t id = block(position);
      const int64_t offset = position % job.block_size;
      tile->k[g] = k_block(id) + offset * shape.key_dim;
      const Storage<E>* v = v_block(id) + offset * shape.value_dim;
      for (int p = 0; p < kPairsPerGroup; ++p) {
        tile->v[g * kPairsPerGroup + p] = v + p * shape.value_dim * E::kPair;
      }
    }
    for (int g = 0; g < kGroups; ++g) {
      if (g >= first && g < last) continue;
      tile->k[g] = tile->k[first];
      for (int p = 0; p < kPairsPerGroup; ++p) tile->v[g * kPairsPerGroup + p] = tile->v[first * kPairsPerGroup];
    }
  }

  // As `locate` for block sizes that 16 does not divide: copies the keys, and the value pairs that straddle blocks.
  void gather(int64_t start, const Scratch<E>& scratch, Tile<E>* tile) {
    const int64_t lo = max64(begin, start), hi = min64(end, start + kTile);
    for (int g = 0; g < kGroups; ++g) tile->k[g] = scratch.k_tile + g * kLanes * shape.key_dim;
    for (int64_t position = lo; position < hi;) {
      const int64_t id = block(position), offset = position % job.block_size;
      const int64_t lane = (position - start) % kLanes;
      const int64_t run = min64(min64(job.block_size - offset, kLanes - lane), hi - position);
      const Storage<E>* from = k_block(id) + shape.k_index(offset);
      Storage<E>* to = scratch.k_tile + (position - start) / kLanes * kLanes * shape.key_dim + lane * E::kPair;
      for (int64_t d = 0; d < shape.key_dim / E::kPair; ++d) {
        memcpy(to + d * kLanes * E::kPair, from + d * shape.tokens_wide * E::kPair,
               static_cast<size_t>(run * E::kPair) * sizeof(Storage<E>));
      }
      for (int64_t i = 0; i < run; ++i) {
        const int64_t index = (position - start + i) / E::kPair;
        tile->v[index] = gather_values(position + i, scratch.v_tile + index * shape.value_dim * E::kPair);
      }
      position += run;
    }
  }

  // The value pair that `position` belongs to: in place if its block holds it whole, else its part copied to `room`.
  const Storage<E>* gather_values(int64_t position, Storage<E>* room) {
    const Storage<E>* values = v_block(block(position));
    const int64_t offset = position % job.block_size;
    if (job.block_size % E::kPair == 0) return values + offset / E::kPair * shape.value_dim * E::kPair;
    for (int64_t d = 0; d < shape.value_dim; ++d) {
      room[d * E::kPair + position % E::kPair] = values[shape.v_index(offset) + d * E::kPair];
    }
    return room;
  }

  // A pair at the edge of [begin, end) has a partner nobody may see. Its weight is zero, but zero times garbage is
  // not: replace the pair by a copy whose partner is zero.
  void clean_edges(int64_t start, const Scratch<E>& scratch, Tile<E>* tile) {
    if constexpr (E::kPair == 2) {
      const int64_t edges[2] = {begin - 1, end};
      for (const int64_t stranger : edges) {
        const bool paired = (stranger == end) == (stranger % 2 == 1);
        if (!paired || stranger < start || stranger >= start + kTile) continue;
        const int64_t index = (stranger - start) / 2, half = stranger % 2;
        Storage<E>* copy = scratch.v_tile + index * shape.value_dim * 2;
        if (tile->v[index] != copy) memcpy(copy, tile->v[index], static_cast<size_t>(shape.value_dim) * 4);
        for (int64_t d = 0; d < shape.value_dim; ++d) copy[d * 2 + half] = 0;
        tile->v[index] = copy;
      }
    }
  }
};

// ---------------------------------------------------------------------------------------------- micro kernels

// scores[r][c * 16 + lane] = query[r] . key[c * 16 + lane] for ROWS rows and COLUMNS vectors of keys.
// The first call for a tile gets `k_next` and fetches all keys of the next tile, a line of each group a step.
template <class E, int ROWS, int COLUMNS>
CB_INLINE void score_columns(const Packed<E>* query, int64_t query_stride, int64_t steps, const Storage<E>* const* k,
                             const Storage<E>* const* k_next, float* scores) {
  Vec acc[ROWS][COLUMNS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) acc[r][c] = splat(0.0f);
  }
  for (int64_t step = 0; step < steps; ++step) {
    typename E::Operand operand[COLUMNS];
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) {
      operand[c] = E::operand(k[c] + step * kLanes * E::kPair);
    }
    if (k_next != nullptr) {
#pragma GCC unroll 8
      for (int g = 0; g < kGroups; ++g) fetch_ahead(k_next[g] + step * kLanes * E::kPair);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < COLUMNS; ++c) {
        acc[r][c] = E::multiply_add(acc[r][c], query + r * query_stride + step * E::kPair, operand[c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) store(scores + r * kTile + c * kLanes, acc[r][c]);
  }
}

// output[r][c * 16 + lane] = output * alpha[r] + weights[r] . values[.][c * 16 + lane], over pairs [first, last).
// With `v_next`, fetches these columns of all values of the next tile, however few pairs this one has.
template <class E, int ROWS, int COLUMNS>
CB_INLINE void add_values(const Packed<E>* weights, int64_t first, int64_t last, const Storage<E>* const* v,
                          const Storage<E>* const* v_next, int64_t column, const float* alpha, float* output,
                          int64_t output_stride) {
  Vec acc[ROWS][COLUMNS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
    const Vec factor = splat(alpha[r]);
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) acc[r][c] = mul(load(output + r * output_stride + c * kLanes), factor);
  }
  for (int64_t p = first; p < last; ++p) {
    typename E::Operand operand[COLUMNS];
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) {
      operand[c] = E::operand(v[p] + (column + c * kLanes) * E::kPair);
    }
    if (v_next != nullptr) {
      for (int64_t other = p - first; other < kTile / E::kPair; other += last - first) {
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) fetch_ahead(v_next[other] + (column + c * kLanes) * E::kPair);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < COLUMNS; ++c) {
        acc[r][c] = E::multiply_add(acc[r][c], weights + r * kTile + p * E::kPair, operand[c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) store(output + r * output_stride + c * kLanes, acc[r][c]);
  }
}

// ---------------------------------------------------------------------------------------------- a panel of rows

// Some rows of a unit against one tile.
template <class E>
struct Panel {
  const AttentionJob& job;
  const Packed<E>* query;  // first row of the panel
  int64_t key_dim, value_dim;
  State state;             // likewise
  const Tile<E>* tile;
  const Tile<E>* next;     // prefetched; null: nothing to prefetch
  float* scores;
  Packed<E>* weights;
  int lo, hi;              // keys of the tile that some row of the panel sees
  int row_lo[kPanel], row_hi[kPanel];  // and each row
  bool whole;                          // whether all of them see the whole tile
};

// Scores as they come from the product, to logits in base 2.
struct Logits {
  float before, cap, after;  // after * cap(before * score)

  explicit Logits(const AttentionJob& job)
      : before(job.softcap != 0.0f ? job.scale / job.softcap : job.scale * kLog2E),
        cap(job.softcap),
        after(job.softcap * kLog2E) {}

  Vec operator()(Vec score) const {
    const Vec x = mul(score, splat(before));
    return cap == 0.0f ? x : mul(tanh_lanes(x), splat(after));
  }
};

// Scores to weights; updates maximum and sum of the rows; alpha[r] is what rescales their output. WHOLE: every row
// sees every key of the tile, as most do, and the loops over its vectors unroll.
template <class E, int ROWS, bool WHOLE>
CB_INLINE void softmax(const Panel<E>& p, float* alpha) {
  const int first = WHOLE ? 0 : p.lo / kLanes, last = WHOLE ? kGroups : (p.hi + kLanes - 1) / kLanes;
  const Logits logits(p.job);
  float before[kLanes] = {}, after[kLanes] = {};
  for (int r = 0; r < ROWS; ++r) {
    float* row = p.scores + r * kTile;
    Vec best = splat(-kInfinity);
#pragma GCC unroll 4
    for (int g = first; g < last; ++g) {
      Vec x = logits(load(row + g * kLanes));
      if (!WHOLE) x = keep_lanes(x, p.row_lo[r] - g * kLanes, p.row_hi[r] - g * kLanes, -kInfinity);
      store(row + g * kLanes, x);
      best = vmax(best, x);
    }
    const float here = max_lanes(best);
    before[r] = p.state.maximum[r];
    after[r] = before[r] > here ? before[r] : here;
    p.state.maximum[r] = after[r];
    if (after[r] == -kInfinity) after[r] = 0.0f;  // nothing seen yet: -inf - 0 stays -inf, without a NaN
  }
  store(alpha, exp2_lanes(sub(load(before), load(after))));
  for (int r = 0; r < ROWS; ++r) {
    const float* row = p.scores + r * kTile;
    const Vec peak = splat(after[r]);
    Vec total = mul(load(p.state.sum + r * kLanes), splat(alpha[r]));
#pragma GCC unroll 4
    for (int g = first; g < last; ++g) {
      const Vec weight = exp2_lanes(sub(load(row + g * kLanes), peak));
      total = add(total, weight);
      E::store_packed(p.weights + r * kTile + g * kLanes, weight);
    }
    store(p.state.sum + r * kLanes, total);
  }
}

template <class E, int ROWS>
static void attend_panel(const Panel<E>& p) {
  const int64_t steps = p.key_dim / E::kPair;
  const int last_group = (p.hi + kLanes - 1) / kLanes;
  for (int g = p.lo / kLanes; g < last_group;) {
    const Storage<E>* const* k = p.tile->k + g;
    const Storage<E>* const* k_next = p.next != nullptr && g == p.lo / kLanes ? p.next->k : nullptr;
    float* scores = p.scores + g * kLanes;
    if (kColumns >= 4 && last_group - g >= 4) {
      score_columns<E, ROWS, kColumns>(p.query, p.key_dim, steps, k, k_next, scores);
      g += kColumns;
    } else if (kColumns >= 2 && last_group - g >= 2) {
      score_columns<E, ROWS, (kColumns >= 2 ? 2 : 1)>(p.query, p.key_dim, steps, k, k_next, scores);
      g += 2;
    } else {
      score_columns<E, ROWS, 1>(p.query, p.key_dim, steps, k, k_next, scores);
      g += 1;
    }
  }

  float alpha[kLanes];
  p.whole ? softmax<E, ROWS, true>(p, alpha) : softmax<E, ROWS, false>(p, alpha);

  const int64_t first = p.lo / E::kPair, last = (p.hi + E::kPair - 1) / E::kPair;
  const Storage<E>* const* v = p.tile->v;
  const Storage<E>* const* v_next = p.next != nullptr ? p.next->v : nullptr;
  for (int64_t d = 0; d < p.value_dim;) {
    float* output = p.state.output + d;
    const int64_t left = p.value_dim - d;
    if (kColumns >= 4 && left >= 4 * kLanes) {
      add_values<E, ROWS, kColumns>(p.weights, first, last, v, v_next, d, alpha, output, p.value_dim);
      d += kColumns * kLanes;
    } else if (kColumns >= 2 && left >= 2 * kLanes) {
      add_values<E, ROWS, (kColumns >= 2 ? 2 : 1)>(p.weights, first, last, v, v_next, d, alpha, output,
                                                             p.value_dim);
      d += 2 * kLanes;
    } else {
      add_values<E, ROWS, 1>(p.weights, first, last, v, v_next, d, alpha, output, p.value_dim);
      d += kLanes;
    }
  }
}

// From a number of rows to the code for exactly that many.
template <class E, int ROWS = kPanel>
CB_INLINE void attend_rows(int rows, const Panel<E>& panel) {
  if (rows == ROWS) {
    attend_panel<E, ROWS>(panel);
  } else if constexpr (ROWS > 1) {
    attend_rows<E, ROWS - 1>(rows, panel);
  }
}

// All panels of the unit against the tile at `start`.
template <class E>
static void attend_tile(const AttentionJob& job, const Shape<E>& shape, const Unit& unit, int64_t start, const Tile<E>& tile,
                        const Tile<E>* next, const Scratch<E>& scratch, State state) {
  const int64_t rows = unit.num_tokens * shape.group;
  const int64_t panels = (rows + kPanel - 1) / kPanel;
  for (int64_t i = 0; i < panels; ++i) {
    const int64_t row = rows * i / panels;  // panels of equal size, give or take one row
    const int count = static_cast<int>(rows * (i + 1) / panels - row);
    Panel<E> panel{job, scratch.query + row * shape.key_dim, shape.key_dim, shape.value_dim,
                   {state.output + row * shape.value_dim, state.sum + row * kLanes, state.maximum + row},
                   &tile, next, scratch.scores, scratch.weights, kTile, 0, {}, {}, true};
    for (int r = 0; r < count; ++r) {
      const int64_t position = unit.first_position + (row + r) / shape.group;
      const int64_t seen_from = job.window > 0 ? position - job.window + 1 : 0;
      const int64_t lo = max64(max64(unit.key_begin, seen_from), start) - start;
      const int64_t hi = min64(min64(unit.key_end, position + 1), start + kTile) - start;
      panel.row_lo[r] = static_cast<int>(lo);
      panel.row_hi[r] = static_cast<int>(max64(hi, 0));
      panel.whole &= hi - lo == kTile;
      if (lo >= hi) continue;
      if (lo < panel.lo) panel.lo = static_cast<int>(lo);
      if (hi > panel.hi) panel.hi = static_cast<int>(hi);
    }
    if (panel.lo >= panel.hi) continue;
    attend_rows<E>(count, panel);
    next = nullptr;  // once is enough
  }
}

// ---------------------------------------------------------------------------------------------- writing the cache

template <class E>
static void write_keys(const Storage<E>* key, int64_t head_dim, int64_t step, Storage<E>* k) {
  const int64_t whole_pairs = head_dim / E::kPair;
  for (int64_t d = 0; d < whole_pairs; ++d) memcpy(k + d * step, key + d * E::kPair, sizeof(Storage<E>) * E::kPair);
  if (head_dim % E::kPair != 0) {  // an odd head size: the last pair's partner
    k[whole_pairs * step] = key[head_dim - 1];
    k[whole_pairs * step + 1] = 0;
  }
}

// One token's values; with `partner` (the next token, in the same pair) two at once, a whole lane per dimension.
template <class E>
static void write_values(const Storage<E>* value, const Storage<E>* partner, int64_t head_dim, Storage<E>* v) {
  if constexpr (E::kPair == 2) {
    if (partner != nullptr) {
      for (int64_t d = 0; d < head_dim; ++d) {
        const uint32_t lane = value[d] | static_cast<uint32_t>(partner[d]) << 16;
        memcpy(v + 2 * d, &lane, 4);
      }
    } else {
#pragma GCC unroll 4
      for (int64_t d = 0; d < head_dim; ++d) v[2 * d] = value[d];
    }
  } else {
    memcpy(v, value, static_cast<size_t>(head_dim) * sizeof(Storage<E>));
  }
}

// `count` tokens from `token` on, which lie one after the other in one group of K of one block.
template <class E>
static void write_run(const AttentionJob& job, const Shape<E>& shape, int64_t token, int64_t count, int64_t slot,
                      int64_t head_begin, int64_t head_end) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Storage<E>));
  const int64_t block = slot / job.block_size, offset = slot % job.block_size;
  for (int64_t head = head_begin; head < head_end; ++head) {
    Storage<E>* k = static_cast<Storage<E>*>(job.k_cache) + block * job.k_block_stride + head * job.k_head_stride +
                    shape.k_index(offset);
    Storage<E>* v = static_cast<Storage<E>*>(job.v_cache) + block * job.v_block_stride + head * job.v_head_stride;
    const Storage<E>* keys =
        static_cast<const Storage<E>*>(job.key) + token * job.key_stride[0] + head * job.key_stride[1];
    const Storage<E>* values =
        static_cast<const Storage<E>*>(job.value) + token * job.value_stride[0] + head * job.value_stride[1];
    for (int64_t i = 0; i < count; ++i) {
      // The scattered stores fill the store buffer long before the processor would see the next rows by itself.
      for (int64_t d = 0; d < job.head_dim; d += kLine) {
        __builtin_prefetch(keys + (i + count) * job.key_stride[0] + d);
        __builtin_prefetch(values + (i + count) * job.value_stride[0] + d);
      }
      write_keys<E>(keys + i * job.key_stride[0], job.head_dim, shape.tokens_wide * E::kPair, k + i * E::kPair);
    }
    for (int64_t i = 0; i < count;) {
      const Storage<E>* value = values + i * job.value_stride[0];
      const bool paired = E::kPair == 2 && (offset + i) % 2 == 0 && i + 1 < count;
      write_values<E>(value, paired ? value + job.value_stride[0] : nullptr, job.head_dim,
                      v + shape.v_index(offset + i));
      i += paired ? 2 : 1;
    }
  }
}

template <class E>
static void write(const AttentionJob& job, int64_t token_begin, int64_t token_end, int64_t head_begin,
                  int64_t head_end) {
  const Shape<E> shape(job);
  for (int64_t token = token_begin; token < token_end;) {
    const int64_t slot = job.slot_mapping[token];
    const int64_t room = shape.tokens_wide - slot % job.block_size % shape.tokens_wide;
    int64_t count = 1;
    while (count < room && token + count < token_end && job.slot_mapping[token + count] == slot + count) ++count;
    write_run<E>(job, shape, token, count, slot, head_begin, head_end);
    token += count;
  }
}

// ---------------------------------------------------------------------------------------------- a unit

// total = total + piece, as softmax states.
CB_INLINE void fold(State total, State piece, int64_t rows, int64_t value_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    const float a = total.maximum[r], b = piece.maximum[r];
    const float peak = a > b ? a : b;
    const Vec shift = splat(peak == -kInfinity ? 0.0f : peak);
    const Vec keep = exp2_lanes(sub(splat(a), shift)), take = exp2_lanes(sub(splat(b), shift));
    for (int64_t d = 0; d < value_dim; d += kLanes) {
      float* output = total.output + r * value_dim + d;
      store(output, fma(load(output), keep, mul(load(piece.output + r * value_dim + d), take)));
    }
    float* sum = total.sum + r * kLanes;
    store(sum, fma(load(sum), keep, mul(load(piece.sum + r * kLanes), take)));
    total.maximum[r] = peak;
  }
}

// Divides by the sum of the weights, sink included, and writes the rows to the output tensor.
template <class E>
static void finish(const AttentionJob& job, const Shape<E>& shape, const Unit& unit, State state) {
  Storage<E>* output = static_cast<Storage<E>*>(job.output);
  for (int64_t r = 0; r < unit.num_tokens * shape.group; ++r) {
    const int64_t head = unit.kv_head * shape.group + r % shape.group;
    float total = sum_lanes(load(state.sum + r * kLanes));
    float factor = 1.0f;
    if (job.sinks != nullptr) {
      const float own = state.maximum[r], sink = job.sinks[head] * kLog2E;
      const float peak = own > sink ? own : sink;
      const float shift = peak == -kInfinity ? 0.0f : peak;
      float scale[kLanes];
      store(scale, exp2_lanes(splat(own - shift)));
      factor = scale[0];
      store(scale, exp2_lanes(splat(sink - shift)));
      total = total * factor + scale[0];
    }
    const Vec norm = splat(total == 0.0f ? 0.0f : factor / total);  // 0: the row sees no key at all
    Storage<E>* to = output + ((unit.first_token + r / shape.group) * job.num_heads + head) * job.head_dim;
    for (int64_t d = 0; d < job.head_dim; d += kLanes) {
      const Vec x = mul(load(state.output + r * shape.value_dim + d), norm);
      if (d + kLanes <= job.head_dim) {
        E::store_output(to + d, x);
      } else {
        Storage<E> rest[kLanes];
        E::store_output(rest, x);
        memcpy(to + d, rest, static_cast<size_t>(job.head_dim - d) * sizeof(Storage<E>));
      }
    }
  }
}

template <class E>
static void pack_query(const AttentionJob& job, const Shape<E>& shape, const Unit& unit, Packed<E>* packed) {
  const Storage<E>* token = static_cast<const Storage<E>*>(job.query) + unit.first_token * job.query_stride[0] +
                            unit.kv_head * shape.group * job.query_stride[1];
  for (int64_t t = 0; t < unit.num_tokens; ++t, token += job.query_stride[0]) {
    const Storage<E>* from = token;
    for (int64_t h = 0; h < shape.group; ++h, from += job.query_stride[1], packed += shape.key_dim) {
      for (int64_t d = 0; d < job.head_dim; ++d) packed[d] = E::pack(from[d]);
      for (int64_t d = job.head_dim; d < shape.key_dim; ++d) packed[d] = 0;
    }
  }
}

template <class E>
static bool attend(const AttentionJob& job, const Unit& unit, const Unit* next_unit, void* memory) {
  const Shape<E> shape(job);
  Scratch<E> scratch;
  Scratch<E>::carve(job, static_cast<char*>(memory), &scratch);
  const int64_t rows = unit.num_tokens * shape.group;
  if (job.units_write && unit.key_end > unit.first_position) {  // of the pieces of a long context, the last one
    write<E>(job, unit.first_token, unit.first_token + unit.num_tokens, unit.kv_head, unit.kv_head + 1);
  }
  pack_query<E>(job, shape, unit, scratch.query);

  State total = State::at(unit.partial != nullptr ? unit.partial : scratch.states[0], rows, shape.value_dim);
  const State piece = State::at(scratch.states[1], rows, shape.value_dim);
  total.clear(rows, shape.value_dim);

  Keys<E> keys(job, shape, unit);
  Tile<E> tiles[2];  // this one and the next, by turns
  const int64_t first_tile = unit.key_begin / kTile * kTile;
  if (shape.direct && keys.begin < keys.end) keys.locate(first_tile, &tiles[0]);
  int turn = 0;
  for (int64_t start = first_tile; start < keys.end; start += kTile, turn ^= 1) {
    Tile<E>& tile = tiles[turn];
    const Tile<E>* prefetch = nullptr;
    if (shape.direct) {
      if (start + kTile < keys.end) {
        keys.locate(start + kTile, &tiles[turn ^ 1]);
        prefetch = &tiles[turn ^ 1];
      } else if (next_unit != nullptr && next_unit->key_begin < next_unit->key_end) {
        Keys<E>(job, shape, *next_unit).locate(next_unit->key_begin / kTile * kTile, &tiles[turn ^ 1]);
        prefetch = &tiles[turn ^ 1];
      }
    } else {
      keys.gather(start, scratch, &tile);
    }
    keys.clean_edges(start, scratch, &tile);
    const bool in_first_piece = start / kPiece == first_tile / kPiece;
    const bool piece_begins = start % kPiece == 0, piece_ends = (start + kTile) % kPiece == 0;
    if (!in_first_piece && piece_begins) piece.clear(rows, shape.value_dim);
    attend_tile<E>(job, shape, unit, start, tile, prefetch, scratch, in_first_piece ? total : piece);
    if (!in_first_piece && (piece_ends || start + kTile >= keys.end)) fold(total, piece, rows, shape.value_dim);
  }
  if (unit.partial == nullptr) finish<E>(job, shape, unit, total);
  return keys.valid;
}

template <class E>
static void merge(const AttentionJob& job, const Unit& unit, float* partials, int64_t count) {
  const Shape<E> shape(job);
  const int64_t rows = unit.num_tokens * shape.group, size = State::floats(rows, shape.value_dim);
  const State total = State::at(partials, rows, shape.value_dim);
  for (int64_t i = 1; i < count; ++i) {
    fold(total, State::at(partials + i * size, rows, shape.value_dim), rows, shape.value_dim);
  }
  finish<E>(job, shape, unit, total);
}

// ---------------------------------------------------------------------------------------------- what is exported

template <class E>
static int64_t scratch_bytes(const AttentionJob& job) {
  return Scratch<E>::carve(job, nullptr, nullptr);
}

template <class E>
static int64_t partial_floats(const AttentionJob& job, int64_t num_tokens) {
  const Shape<E> shape(job);
  return State::floats(num_tokens * shape.group, shape.value_dim);
}

template <class E>
constexpr cb_engine::AttentionKernels attention_kernels_of() {
  return {E::kPair, scratch_bytes<E>, partial_floats<E>, write<E>, attend<E>, merge<E>};
}

}  // namespace
