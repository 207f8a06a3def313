// The front of a canonical decoder layer in one call: norm, attention with its four products, residual, norm. Each part
// is the kernel that its module calls, so the result is the same bits as theirs.

#include <vector>

#include "kernels.h"
#include "threads.h"

namespace moestro {

// A product; `bias` may be null.
struct Product {
    const bf16 *weight, *bias;
};

// An RMS norm over each `size` entries; a null weight means none.
struct Norm {
    const bf16* weight;
    i64 size;
    float epsilon;
};

struct LayerFront {
    Norm before, query_norm, key_norm, between;
    Product query, key, value, output;
    const float* sinks;
    i64 hidden, num_heads, num_kv_heads, head_size, window;
    float scaling;
};

struct StepUnits {
    const int32_t* tables;
    const i64 *rows, *lengths, *write_slots;
    i64 num_units, table_width, num_tokens, block_size;
};

static void multiply(const Product& product, const bf16* rows, std::vector<bf16>& out, i64 num_rows, i64 outputs,
                     i64 inputs) {
    out.resize(num_rows * outputs);
    moestro_linear(rows, product.weight, product.bias, out.data(), num_rows, outputs, inputs);
}

static void normalize(const Norm& norm, bf16* rows, i64 count) {
    if (norm.weight) moestro_rms_norm(rows, norm.weight, rows, count / norm.size, norm.size, norm.epsilon);
}

static void add_rows(const bf16* a, const bf16* b, bf16* out, i64 num_rows, i64 size) {
    parallel(num_rows, num_rows * size, [&](i64 r) {
        for (i64 i = r * size; i < (r + 1) * size; i += LANES) store_bf16(out + i, load_bf16(a + i) + load_bf16(b + i));
    });
}

}  // namespace moestro

using namespace moestro;

// stream[tokens][hidden] = hidden + attention(norm(hidden)); inputs = norm(stream). `hidden` and `stream` may not overlap.
MOESTRO_KERNEL void moestro_layer_front(const LayerFront* layer, const StepUnits* step, const bf16* cos, const bf16* sin,
                                        bf16* keys, bf16* values, const bf16* hidden, bf16* stream, bf16* inputs) {
    static thread_local std::vector<bf16> query, key, value, attended, mixed;
    const i64 tokens = step->num_tokens, size = layer->head_size, width = layer->hidden;
    const i64 query_width = layer->num_heads * size, key_width = layer->num_kv_heads * size;
    moestro_rms_norm(hidden, layer->before.weight, inputs, tokens, width, layer->before.epsilon);
    multiply(layer->query, inputs, query, tokens, query_width, width);
    multiply(layer->key, inputs, key, tokens, key_width, width);
    multiply(layer->value, inputs, value, tokens, key_width, width);
    normalize(layer->query_norm, query.data(), tokens * query_width);
    normalize(layer->key_norm, key.data(), tokens * key_width);
    moestro_rotate(query.data(), query_width, size, cos, sin, query.data(), tokens, layer->num_heads, size);
    moestro_rotate(key.data(), key_width, size, cos, sin, key.data(), tokens, layer->num_kv_heads, size);
    moestro_write_slots(key.data(), key_width, size, step->write_slots, tokens, layer->num_kv_heads, size, keys);
    moestro_write_slots(value.data(), key_width, size, step->write_slots, tokens, layer->num_kv_heads, size, values);
    attended.resize(tokens * query_width);
    moestro_attend(query.data(), query_width, size, keys, values, step->tables, step->rows, step->lengths, layer->sinks,
                   attended.data(), step->num_units, step->table_width, layer->num_heads, layer->num_kv_heads, size, size,
                   size, step->block_size, layer->window, layer->scaling);
    multiply(layer->output, attended.data(), mixed, tokens, width, query_width);
    add_rows(hidden, mixed.data(), stream, tokens, width);
    moestro_rms_norm(stream, layer->between.weight, inputs, tokens, width, layer->between.epsilon);
}
