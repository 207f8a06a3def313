// Loops over independent parts of a result. Each part is computed by one thread in a fixed order, so that the number of
// threads changes no bit.
#pragma once

#include "vectors.h"

namespace moestro {

extern int num_threads;

constexpr i64 LEAST_PARALLEL_WORK = 1 << 16;  // products below which waking a thread costs more than it saves

template <typename Body>
static inline void parallel(i64 count, [[maybe_unused]] i64 work, Body body) {
#if defined(_OPENMP)
    if (num_threads > 1 && count > 1 && work >= LEAST_PARALLEL_WORK) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
        for (i64 i = 0; i < count; i++) body(i);
        return;
    }
#endif
    for (i64 i = 0; i < count; i++) body(i);
}

}  // namespace moestro
