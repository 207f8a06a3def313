// Attention of a step over paged K and V. A query is computed alone, in ascending order of the keys' positions, however
// many queries share a tile and wherever the tile begins. So neither batch nor chunk changes a bit of its result.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "linear.h"
#include "threads.h"

namespace moestro {

constexpr int KEYS = 16;          // keys whose scores are computed together, from a multiple of it on
#if defined(__AMX_BF16__)
constexpr int MOST_QUERIES = 16;  // queries (tokens * heads of one KV head) that read the same keys together
#else
constexpr int MOST_QUERIES = 64;
#endif

struct Queries {
    const bf16* data;  // of token t and head h: data + t * token_stride + h * head_stride
    i64 token_stride, head_stride, num_heads;
};

struct PagedPool {
    const bf16* keys;    // [slots][kv_heads][key_size]
    const bf16* values;  // [slots][kv_heads], rows of value_size entries that are value_stride apart
    i64 num_kv_heads, key_size, value_size, value_stride, block_size;
};

struct AttentionScores {
    float scaling;
    i64 window;          // positions that a query sees, its own included; 0 means all
    const float* sinks;  // [heads], score of one more key of value zero; null means none
};

// Some consecutive tokens of a unit, and some heads of one KV head.
struct AttentionTile {
    i64 unit, kv_head, first_head, num_heads;
    i64 first_row, num_rows, position;  // row in the step, and position in the sequence, of the first token
};

// Turn the scores of positions begin .. end - 1 into weights that add up to 1 with the sink's; zero for other positions.
static void soften(float* scores, i64 first, i64 last, i64 begin, i64 end, const float* sink) {
    Floats most = broadcast(-INFINITY);
    for (i64 i = first; i < last; i += LANES) {
        float* at = scores + i - first;
        if (i < begin || i + LANES > end)
            for (int j = 0; j < LANES; j++)
                if (i + j < begin || i + j >= end) at[j] = -INFINITY;
        most = maximum(most, load<Floats>(at));
    }
    const float peak = sink ? std::max(largest(most), *sink) : largest(most);
    Floats total = {};
    for (i64 i = first; i < last; i += LANES) {
        float* at = scores + i - first;
        const Floats score = load<Floats>(at);
        const Ints is_seen = score != broadcast(-INFINITY);
        const Floats weight = (Floats)((Ints)exponential(score - broadcast(peak)) & is_seen);
        total += weight;
        store(at, weight);
    }
    float all = sum(total);
    if (sink) all += sum(exponential(broadcast(*sink - peak))) / LANES;
    const Floats share = broadcast(1.0f / all);
    for (i64 i = first; i < last; i += LANES) store(scores + i - first, load<Floats>(scores + i - first) * share);
}

static i64 begin_of(i64 position, i64 window) { return window > 0 ? std::max<i64>(position + 1 - window, 0) : 0; }

// The queries of a tile, and where their results go. All see positions `begin` .. `end` - 1 or a part of them, whose keys
// and values are listed from `first` to `last`, whole groups of KEYS; those around them are weighted with zero.
struct TileQueries {
    const bf16* query[MOST_QUERIES];
    const float* sink[MOST_QUERIES];
    i64 position[MOST_QUERIES];
    bf16* out[MOST_QUERIES];
    int count;
    i64 begin, end, first, last;
    const bf16 *const *keys, *const *values;
};

static void soften_query(const TileQueries& tile, int q, i64 window, float* scores) {
    const i64 position = tile.position[q];
    soften(scores, tile.first, tile.last, begin_of(position, window), position + 1, tile.sink[q]);
}

#if defined(__AMX_BF16__)
// The same in tile registers, 16 queries at once. Weights are rounded to bfloat16.
static void attend_queries(const TileQueries& tile, const PagedPool& pool, const AttentionScores& how) {
    constexpr int SIDE = 16;  // rows of a tile register, of 16 words each
    const i64 width = tile.last - tile.first, padded = (width + 2 * SIDE - 1) / (2 * SIDE) * (2 * SIDE);
    const i64 key_size = pool.key_size, value_size = pool.value_size;
    static thread_local std::vector<uint32_t> turned;  // queries as [key_size / 2][SIDE] words
    static thread_local std::vector<float> scores;
    static thread_local std::vector<bf16> weights;
    bf16 rows[SIDE * 32];
    uint32_t words[4 * SIDE * SIDE];
    float block[SIDE * 4 * SIDE];
    // A block of K has a whole number of groups, so that a group has one distance between its keys.
    const bool is_even = pool.block_size % SIDE == 0;
    const __m512i column_of = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    uint16_t pairs[32];  // entries of two rows in turn: 0, 32, 1, 33, ..
    for (int i = 0; i < 32; i++) pairs[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    const __m512i low_half = load<__m512i>(pairs), high_half = _mm512_add_epi16(low_half, _mm512_set1_epi16(16));
    TileShapes shapes;
    for (int i = 0; i < 7; i++) shapes.bytes_of_row[i] = 64, shapes.rows[i] = SIDE;
    _tile_loadconfig(&shapes);
    for (int first = 0; first < tile.count; first += SIDE) {
        const int count = std::min(SIDE, tile.count - first);
        turned.assign(key_size / 2 * SIDE, 0);
        scores.resize(SIDE * padded);
        weights.assign(SIDE * padded, 0);
        for (int q = 0; q < count; q++)
            for (i64 d = 0; d < key_size; d += 2) memcpy(&turned[d / 2 * SIDE + q], tile.query[first + q] + d, 4);
        for (i64 i = 0; i < width; i += SIDE) {
            _tile_zero(0);
            const bf16* const* keys = tile.keys + i;
            const i64 stride = keys[1] - keys[0];
            const bool is_regular = stride > 0 && keys[SIDE - 1] - keys[0] == (SIDE - 1) * stride && is_even;
            for (i64 d = 0; d < key_size; d += 32) {
                if (is_regular) {
                    _tile_loadd(4, keys[0] + d, stride * sizeof(bf16));
                } else {
                    for (int j = 0; j < SIDE; j++) memcpy(rows + j * 32, keys[j] + d, 64);
                    _tile_loadd(4, rows, 64);
                }
                _tile_loadd(5, &turned[d / 2 * SIDE], 64);
                _tile_dpbf16ps(0, 4, 5);
            }
            _tile_stored(0, block, 64);
            for (int q = 0; q < count; q++)
                store(&scores[q * padded + i], (Floats)_mm512_i32gather_ps(column_of, block + q, 4) * broadcast(how.scaling));
        }
        for (int q = 0; q < count; q++) {
            float* score = &scores[q * padded];
            soften_query(tile, first + q, how.window, score);
            for (i64 i = 0; i < width; i += LANES) store_bf16(&weights[q * padded + i], load<Floats>(score + i));
        }
        for (i64 column = 0; column < value_size; column += 4 * SIDE) {
            const int num_tiles = static_cast<int>(std::min<i64>(4, (value_size - column) / SIDE));
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (i64 i = 0; i < padded; i += 2 * SIDE) {
                for (int pair = 0; pair < SIDE; pair++) {
                    const i64 at = std::min(i + 2 * pair, width - 2);  // beyond the end, weighted with zero
                    for (int t = 0; t < num_tiles; t += 2) {
                        const __m512i one = load<__m512i>(tile.values[at] + column + t * SIDE);
                        const __m512i other = load<__m512i>(tile.values[at + 1] + column + t * SIDE);
                        uint32_t* to = words + (t * SIDE + pair) * SIDE;
                        store(to, _mm512_permutex2var_epi16(one, low_half, other));
                        store(to + SIDE * SIDE, _mm512_permutex2var_epi16(one, high_half, other));
                    }
                }
                _tile_loadd(4, &weights[i], padded * sizeof(bf16));
                _tile_loadd(5, words, 64);
                _tile_dpbf16ps(0, 4, 5);
                _tile_loadd(6, words + SIDE * SIDE, 64);
                _tile_dpbf16ps(1, 4, 6);
                if (num_tiles < 4) continue;
                _tile_loadd(5, words + 2 * SIDE * SIDE, 64);
                _tile_dpbf16ps(2, 4, 5);
                _tile_loadd(6, words + 3 * SIDE * SIDE, 64);
                _tile_dpbf16ps(3, 4, 6);
            }
            _tile_stored(0, block, 256);
            _tile_stored(1, block + SIDE, 256);
            _tile_stored(2, block + 2 * SIDE, 256);
            _tile_stored(3, block + 3 * SIDE, 256);
            for (int q = 0; q < count; q++)
                for (int t = 0; t < num_tiles; t++)
                    store_bf16(tile.out[first + q] + column + t * SIDE, load<Floats>(block + (q * 4 + t) * SIDE));
        }
    }
    _tile_release();
}
#else
#if defined(__AVX512F__)
// Turn a square of words by its diagonal.
static void turn(__m512i* rows) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    __m512i mixed[LANES];
    for (int stage = 0; stage < 4; stage++) {
        for (int i = 0; i < LANES / 2; i++) {
            mixed[2 * i] = _mm512_permutex2var_epi32(rows[i], low, rows[i + LANES / 2]);
            mixed[2 * i + 1] = _mm512_permutex2var_epi32(rows[i], high, rows[i + LANES / 2]);
        }
        for (int i = 0; i < LANES; i++) rows[i] = mixed[i];
    }
}

// turned[size / 2] from KEYS keys: each has a word of every key. `size` is a multiple of 32.
static void turn_keys(const bf16* const* keys, i64 size, Pairs* turned) {
    __m512i words[KEYS];
    for (i64 d = 0; d < size; d += 2 * LANES) {
        for (int i = 0; i < KEYS; i++) words[i] = load<__m512i>(keys[i] + d);
        turn(words);
        for (int i = 0; i < LANES; i++) turned[d / 2 + i] = pairs_of((Words)words[i]);
    }
}

// scores[NUM_QUERIES][KEYS] with rows `stride` apart. Each is a lane, and its products are added in ascending order.
template <int NUM_QUERIES>
static void score_queries(const Input* queries, const Pairs* turned, i64 size, float scaling, float* scores, i64 stride) {
    Floats total[NUM_QUERIES] = {};
    for (i64 d = 0; d < size; d += 2)
        for (int q = 0; q < NUM_QUERIES; q++)
            total[q] = add_products(total[q], turned[d / 2], broadcast_pair(queries + q * size + d));
    for (int q = 0; q < NUM_QUERIES; q++) store(scores + q * stride, total[q] * broadcast(scaling));
}

static void score_tile(const TileQueries& tile, i64 size, float scaling, float* scores) {
    const i64 width = tile.last - tile.first;
    static thread_local std::vector<Input> queries;
    static thread_local std::vector<Pairs> turned;
    queries.resize(tile.count * size);
    turned.resize(size / 2);
    for (int q = 0; q < tile.count; q++) read_inputs(tile.query[q], &queries[q * size], size);
    for (i64 i = 0; i < width; i += KEYS) {
        turn_keys(tile.keys + i, size, turned.data());
        int q = 0;
        const auto score = [&](auto num_queries) {
            for (; q + num_queries <= tile.count; q += num_queries)
                score_queries<num_queries>(&queries[q * size], turned.data(), size, scaling, scores + q * width + i, width);
        };
        score(std::integral_constant<int, 8>());
        score(std::integral_constant<int, 4>());
        score(std::integral_constant<int, 2>());
        score(std::integral_constant<int, 1>());
    }
}
#else
static void score_tile(const TileQueries& tile, i64 size, float scaling, float* scores) {
    const i64 width = tile.last - tile.first;
    for (int q = 0; q < tile.count; q++)
        for (i64 i = 0; i < width; i += KEYS) {
            Floats total[KEYS] = {};
            for (i64 d = 0; d < size; d += 2 * LANES) {
                const Pairs part = pairs_of(load<Words>(tile.query[q] + d));
                for (int j = 0; j < KEYS; j++)
                    total[j] = add_products(total[j], pairs_of(load<Words>(tile.keys[i + j] + d)), part);
            }
            for (int j = 0; j < KEYS; j++) scores[q * width + i + j] = sum(total[j]) * scaling;
        }
}
#endif

// totals[q][..] += weights[q][i] * values[i] for some queries and columns, values in ascending order.
template <int NUM_QUERIES, int VECTORS>
static void add_columns(const float* weights, i64 stride, const float* values, i64 count, i64 size, float* totals) {
    Floats total[NUM_QUERIES][VECTORS];
    for (int q = 0; q < NUM_QUERIES; q++)
        for (int v = 0; v < VECTORS; v++) total[q][v] = load<Floats>(totals + q * size + v * LANES);
    for (i64 i = 0; i < count; i++, values += size) {
        Floats value[VECTORS];
        for (int v = 0; v < VECTORS; v++) value[v] = load<Floats>(values + v * LANES);
        for (int q = 0; q < NUM_QUERIES; q++) {
            const Floats weight = broadcast(weights[q * stride + i]);
            for (int v = 0; v < VECTORS; v++) total[q][v] = multiply_add(weight, value[v], total[q][v]);
        }
    }
    for (int q = 0; q < NUM_QUERIES; q++)
        for (int v = 0; v < VECTORS; v++) store(totals + q * size + v * LANES, total[q][v]);
}

template <int NUM_QUERIES>
static void add_values(const float* weights, i64 stride, const float* values, i64 count, i64 size, float* totals) {
    i64 column = 0;
    for (; column + COLUMN_VECTORS * LANES <= size; column += COLUMN_VECTORS * LANES)
        add_columns<NUM_QUERIES, COLUMN_VECTORS>(weights, stride, values + column, count, size, totals + column);
    for (; column < size; column += 2 * LANES)
        add_columns<NUM_QUERIES, 2>(weights, stride, values + column, count, size, totals + column);
}

// The queries' sums of weighted values. Some values at a time are widened for all queries.
static void add_tile(const TileQueries& tile, i64 size, const float* weights, i64 stride) {
    constexpr i64 PART = 64;
    static thread_local std::vector<float> values, totals;
    values.resize(PART * size);
    totals.assign(tile.count * size, 0);
    for (i64 first = tile.begin; first < tile.end; first += PART) {
        const i64 count = std::min(PART, tile.end - first);
        for (i64 i = 0; i < count; i++) widen(tile.values[first - tile.first + i], &values[i * size], size);
        int q = 0;
        const auto add = [&](auto num_queries) {
            for (; q + num_queries <= tile.count; q += num_queries)
                add_values<num_queries>(weights + q * stride + first - tile.first, stride, values.data(), count, size,
                                        &totals[q * size]);
        };
        add(std::integral_constant<int, TILE_QUERIES>());
        add(std::integral_constant<int, 4>());
        add(std::integral_constant<int, 2>());
        add(std::integral_constant<int, 1>());
    }
    for (int q = 0; q < tile.count; q++)
        for (i64 j = 0; j < size; j += LANES) store_bf16(tile.out[q] + j, load<Floats>(&totals[q * size + j]));
}

static void attend_queries(const TileQueries& tile, const PagedPool& pool, const AttentionScores& how) {
    const i64 width = tile.last - tile.first;
    static thread_local std::vector<float> scores;
    scores.resize(tile.count * width);
    score_tile(tile, pool.key_size, how.scaling, scores.data());
    for (int q = 0; q < tile.count; q++) soften_query(tile, q, how.window, &scores[q * width]);
    add_tile(tile, pool.value_size, scores.data(), width);
}
#endif

// Compute the tile's heads for its tokens.
static void attend_tile(const Queries& queries, const PagedPool& pool, const AttentionScores& how,
                        const AttentionTile& tile, const int32_t* table, bf16* out) {
    const i64 key_width = pool.num_kv_heads * pool.key_size;
    TileQueries found;
    const i64 begin = found.begin = begin_of(tile.position, how.window), end = found.end = tile.position + tile.num_rows;
    const i64 first = found.first = begin / KEYS * KEYS, last = found.last = (end + KEYS - 1) / KEYS * KEYS;
    static thread_local std::vector<const bf16*> keys, values;
    keys.resize(last - first);
    values.resize(last - first);
    i64 block = begin / pool.block_size, inside = begin % pool.block_size;
    for (i64 i = begin - first; i < end - first; i++) {
        const i64 slot = table[block] * pool.block_size + inside;
        keys[i] = pool.keys + slot * key_width + tile.kv_head * pool.key_size;
        values[i] = pool.values + (slot * pool.num_kv_heads + tile.kv_head) * pool.value_stride;
        if (++inside == pool.block_size) inside = 0, block++;
    }
    for (auto* list : {&keys, &values}) {
        std::fill(list->begin(), list->begin() + (begin - first), (*list)[begin - first]);
        std::fill(list->begin() + (end - first), list->end(), (*list)[end - first - 1]);
    }
    found.keys = keys.data();
    found.values = values.data();
    found.count = static_cast<int>(tile.num_rows * tile.num_heads);
    for (int q = 0; q < found.count; q++) {
        const i64 row = tile.first_row + q / tile.num_heads, head = tile.first_head + q % tile.num_heads;
        found.query[q] = queries.data + row * queries.token_stride + head * queries.head_stride;
        found.sink[q] = how.sinks ? how.sinks + head : nullptr;
        found.position[q] = tile.position + q / tile.num_heads;
        found.out[q] = out + (row * queries.num_heads + head) * pool.value_size;
    }
    attend_queries(found, pool, how);
}

}  // namespace moestro

using namespace moestro;

// Write a step's K (or V) to its pool [slots][heads][size].
MOESTRO_KERNEL void moestro_write_slots(const bf16* from, i64 token_stride, i64 head_stride, const i64* slots,
                                        i64 num_tokens, i64 num_heads, i64 size, bf16* pool) {
    for (i64 token = 0; token < num_tokens; token++)
        for (i64 head = 0; head < num_heads; head++)
            memcpy(pool + (slots[token] * num_heads + head) * size, from + token * token_stride + head * head_stride,
                   size * sizeof(bf16));
}

// out[tokens][heads][value_size]: each token attends to its unit's positions up to its own.
//
// Unit u has the tokens rows[u] .. rows[u + 1] - 1, of which the last is at position lengths[u] - 1; its block table is
// tables + u * table_width. Key and value sizes are multiples of 32. Values may be parts of the keys' rows.
MOESTRO_KERNEL void moestro_attend(const bf16* query, i64 token_stride, i64 head_stride, const bf16* keys,
                                   const bf16* values, const int32_t* tables, const i64* rows, const i64* lengths,
                                   const float* sinks, bf16* out, i64 num_units, i64 table_width, i64 num_heads,
                                   i64 num_kv_heads, i64 key_size, i64 value_size, i64 value_stride, i64 block_size,
                                   i64 window, float scaling) {
    const Queries queries{query, token_stride, head_stride, num_heads};
    const PagedPool pool{keys, values, num_kv_heads, key_size, value_size, value_stride, block_size};
    const AttentionScores how{scaling, window, sinks};
    const i64 group = num_heads / num_kv_heads, most_heads = std::min<i64>(group, MOST_QUERIES);
    const i64 most_rows = MOST_QUERIES / most_heads;
    static thread_local std::vector<AttentionTile> tiles;
    tiles.clear();
    i64 work = 0;
    for (i64 unit = 0; unit < num_units; unit++) {
        const i64 num_tokens = rows[unit + 1] - rows[unit];
        work += num_tokens * lengths[unit] * num_heads * key_size;
        for (i64 done = 0; done < num_tokens; done += most_rows)
            for (i64 head = 0; head < num_heads; head += std::min(most_heads, group - head % group))
                tiles.push_back({unit, head / group, head, std::min(most_heads, group - head % group), rows[unit] + done,
                                 std::min(most_rows, num_tokens - done), lengths[unit] - num_tokens + done});
    }
    const AttentionTile* list = tiles.data();
    parallel(static_cast<i64>(tiles.size()), work, [&](i64 i) {
        attend_tile(queries, pool, how, list[i], tables + list[i].unit * table_width, out);
    });
}
