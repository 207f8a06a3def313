// Fractions of steps in which a copy gets no token.

#pragma once

#include <cmath>

// exp(x) of x <= 0, as `replicas._exponentials` computes it.
inline double exponential(double x) {
    constexpr double LOG2_E = 0x1.71547652b82fep+0, LN2_HIGH = 0x1.62e42fee00000p-1, LN2_LOW = 0x1.a39ef35793c76p-33;
    constexpr double LEAST = -700.0;
    constexpr double FACTORIALS[] = {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0,
                                     120.0,       24.0,       6.0,       2.0,      1.0,     1.0};
    x = x > LEAST ? x : LEAST;
    const double twos = std::nearbyint(x * LOG2_E), rest = (x - twos * LN2_HIGH) - twos * LN2_LOW;
    double sum = 1.0 / 6227020800.0;
    for (const double each : FACTORIALS) sum = sum * rest + 1.0 / each;
    return std::ldexp(sum, int(twos));
}

// `replicas._idle_parts`: idle to the power of the share.
inline double idle_part(double idle, double log_idle, double share) {
    return idle > 0 && share < 1 ? exponential(log_idle * share) : idle;
}
