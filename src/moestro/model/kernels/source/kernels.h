// The kernels that other kernels call. Their sources include this file too, so that the compiler compares both.
#pragma once

#include "vectors.h"

using moestro::bf16;
using moestro::i64;

MOESTRO_KERNEL void moestro_linear(const bf16* rows, const bf16* packed, const bf16* bias, bf16* out, i64 num_rows,
                                   i64 outputs, i64 inputs);
MOESTRO_KERNEL void moestro_rms_norm(const bf16* rows, const bf16* weight, bf16* out, i64 num_rows, i64 size,
                                     float epsilon);
MOESTRO_KERNEL void moestro_rotate(const bf16* heads, i64 token_stride, i64 head_stride, const bf16* cos, const bf16* sin,
                                   bf16* out, i64 num_tokens, i64 num_heads, i64 size);
MOESTRO_KERNEL void moestro_write_slots(const bf16* from, i64 token_stride, i64 head_stride, const i64* slots,
                                        i64 num_tokens, i64 num_heads, i64 size, bf16* pool);
MOESTRO_KERNEL void moestro_attend(const bf16* query, i64 token_stride, i64 head_stride, const bf16* keys,
                                   const bf16* values, const int32_t* tables, const i64* rows, const i64* lengths,
                                   const float* sinks, bf16* out, i64 num_units, i64 table_width, i64 num_heads,
                                   i64 num_kv_heads, i64 key_size, i64 value_size, i64 value_stride, i64 block_size,
                                   i64 window, float scaling);
