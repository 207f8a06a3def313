// The scores of the routing policies `moestro` and `lmetric`, and the passes over all engines that a decision makes.
//
// One pass reads each column once. NumPy's code beside the callers makes a pass for each sum. Both round each sum and
// each product on its own and in the same order, so that their results are equal to the bit.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Columns of an engine table, each of `num_engines` rows. A figure has its values and the times of its reports.
struct Columns {
    int64_t num_engines;
    const double *load, *waiting, *own_tokens, *reported_tokens, *kv_tokens, *speed, *decode_speed, *copy_price;
    const int64_t* foreign;
    const double* kv_usage;
    const int64_t* kv_usage_ns;
    const double* pressure;
    const int64_t* pressure_ns;
};

// What a decision of `moestro` has beside the columns; `hosted` may be null.
struct Request {
    const double *hits, *hosted, *work;
    int64_t num_work;
    double known, answer, decode_weight, least_weight, per_work;
    int64_t oldest_ns, has_speeds;
};

bool any_foreign(const Columns& columns) {
    int64_t found = 0;
    for (int64_t row = 0; row < columns.num_engines; ++row) found |= columns.foreign[row];
    return found != 0;
}

double sum(const double* column, int64_t num) {
    double total = 0;
    for (int64_t row = 0; row < num; ++row) total += column[row];  // whole numbers, so any order gives this sum
    return total;
}

bool any_since(const int64_t* times, int64_t num, int64_t oldest_ns) {
    bool found = false;
    for (int64_t row = 0; row < num; ++row) found |= times[row] >= oldest_ns;
    return found;
}

// Writes the tokens to compute before the first token of a request: its own, those queued, and those without a block.
void add_ahead(const Columns& columns, const Request& request, double* __restrict__ ahead) {
    const int64_t num = columns.num_engines;
    const double *own = columns.own_tokens, *reported = columns.reported_tokens, *hits = request.hits;
    const double known = request.known;
    for (int64_t row = 0; row < num; ++row) ahead[row] = own[row] < reported[row] ? own[row] : reported[row];
    if (any_since(columns.kv_usage_ns, num, request.oldest_ns)) {
        for (int64_t row = 0; row < num; ++row) {
            const double left = known - hits[row], free = (1 - columns.kv_usage[row]) * columns.kv_tokens[row];
            const double missing = (left > 1 ? left : 1) + request.answer - free;
            ahead[row] += columns.kv_usage_ns[row] >= request.oldest_ns && missing > 0 ? missing : 0;
        }
    }
    for (int64_t row = 0; row < num; ++row) {
        const double left = known - hits[row];
        ahead[row] += left > 1 ? left : 1;
    }
    if (request.hosted) {
        for (int64_t row = 0; row < num; ++row) ahead[row] += request.hosted[row] * columns.copy_price[row];
    }
}

// Replaces the tokens ahead by the delays of all requests.
template <bool kHasSpeeds>
void add_delays(const Columns& columns, const Request& request, double* __restrict__ scores) {
    const int64_t num = columns.num_engines, num_work = request.num_work < num ? request.num_work : num;
    const double *load = columns.load, *waiting = columns.waiting, *hits = request.hits, *work = request.work;
    const double *speed = columns.speed, *decode_speed = columns.decode_speed;
    const double num_waiting = sum(waiting, num), ratio = (sum(load, num) - num_waiting + 1) / (num_waiting + 1);
    const double weight = request.least_weight < ratio ? ratio : request.least_weight;
    const double answer_weight = request.decode_weight * request.answer, known = request.known, per_work = request.per_work;
    const auto score_of = [=](int64_t row, double share, double ahead) {
        const double left = known - hits[row], fresh = left > 1 ? left : 1, batch = share + load[row];
        const double delay = (fresh * waiting[row] + ahead) * weight + (batch - waiting[row]) * fresh;
        const double answers = batch * answer_weight;
        return kHasSpeeds ? delay / speed[row] + answers / decode_speed[row] : delay + answers;
    };
    for (int64_t row = 0; row < num_work; ++row) scores[row] = score_of(row, work[row] * per_work, scores[row]);
    for (int64_t row = num_work; row < num; ++row) scores[row] = score_of(row, 0, scores[row]);
}

// Returns the lowest value of all rows. Lanes make the next comparison independent of the last one; NaN is no value.
template <typename ValueOf>
double lowest_of(int64_t num, ValueOf value_of) {
    constexpr int64_t kLanes = 8;
    double lowest[kLanes];
    for (double& each : lowest) each = kInfinity;
    int64_t row = 0;
    for (; row + kLanes <= num; row += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const double value = value_of(row + lane);
            lowest[lane] = value < lowest[lane] ? value : lowest[lane];
        }
    }
    for (; row < num; ++row) {
        const double value = value_of(row);
        lowest[0] = value < lowest[0] ? value : lowest[0];
    }
    for (double each : lowest) lowest[0] = each < lowest[0] ? each : lowest[0];
    return lowest[0];
}

}  // namespace

// Writes the scores of `Moestro.scores`, and returns 1. Returns 0 where an engine has requests of foreign routers.
EXPORTED int64_t moestro_delays(const Columns* columns, const Request* request, double* scores) {
    const int64_t num = columns->num_engines, oldest_ns = request->oldest_ns;
    if (any_foreign(*columns)) return 0;
    add_ahead(*columns, *request, scores);
    if (request->has_speeds) {
        add_delays<true>(*columns, *request, scores);
    } else {
        add_delays<false>(*columns, *request, scores);
    }
    if (any_since(columns->pressure_ns, num, oldest_ns)) {
        for (int64_t row = 0; row < num; ++row) {
            const double pressure = columns->pressure[row] > 1 ? columns->pressure[row] : 1;
            scores[row] *= columns->pressure_ns[row] >= oldest_ns ? pressure : 1;
        }
    }
    return 1;
}

// Writes the scores of `lmetric_score`, and returns 1. Returns 0 where an engine has requests of foreign routers.
EXPORTED int64_t moestro_products(const Columns* table, const double* hits, double known, double* scores) {
    const Columns columns = *table;
    if (any_foreign(columns)) return 0;
    for (int64_t row = 0; row < columns.num_engines; ++row) {
        const double own = columns.own_tokens[row], reported = columns.reported_tokens[row];
        scores[row] = ((known - hits[row]) + (own < reported ? own : reported)) * (columns.load[row] + 1);
    }
    return 1;
}

// Returns the row of the only lowest finite score among the rows of a set; -1 where there is no such row.
EXPORTED int64_t moestro_lowest(const double* scores, const uint8_t* among, int64_t num) {
    const bool has_all = !std::memchr(among, 0, num);
    const double least = has_all ? lowest_of(num, [=](int64_t row) { return scores[row]; })
                                 : lowest_of(num, [=](int64_t row) { return among[row] ? scores[row] : kInfinity; });
    if (!std::isfinite(least)) return -1;
    int64_t found = -1;
    for (int64_t row = 0; row < num; ++row) {
        if (scores[row] != least || !among[row]) continue;
        if (found >= 0) return -1;
        found = row;
    }
    return found;
}

// Returns how many rows of a set have at least so many hits, times 2^32, and how many rows it has.
EXPORTED int64_t moestro_holders(const double* hits, double least, const uint8_t* among, int64_t num) {
    int64_t has = 0, in_all = 0;
    for (int64_t row = 0; row < num; ++row) {
        has += among[row] & (hits[row] >= least);
        in_all += among[row];
    }
    return has << 32 | in_all;
}

// Returns whether the lowest score of the rows that have at least so many hits is below that of the others in a set.
EXPORTED int64_t moestro_is_lower(
    const double* scores, const double* hits, double least, const uint8_t* among, int64_t num) {
    if (!std::memchr(among, 0, num)) {
        return lowest_of(num, [=](int64_t row) { return hits[row] >= least ? scores[row] : kInfinity; }) <
               lowest_of(num, [=](int64_t row) { return hits[row] >= least ? kInfinity : scores[row]; });
    }
    return lowest_of(num, [=](int64_t row) { return among[row] && hits[row] >= least ? scores[row] : kInfinity; }) <
           lowest_of(num, [=](int64_t row) { return among[row] && hits[row] < least ? scores[row] : kInfinity; });
}

// Writes a value to the rows whose bits are set, the lowest bit of the first byte first.
EXPORTED void moestro_fill(double* found, const uint8_t* bits, int64_t num, double value) {
    // Without branches, two rows at a time: a set of thousands of engines has no pattern.
    typedef uint64_t Pair __attribute__((vector_size(16)));
    const Pair masks[4] = {{0, 0}, {~0ull, 0}, {0, ~0ull}, {~0ull, ~0ull}};
    const double twice[2] = {value, value};
    Pair wanted;
    std::memcpy(&wanted, twice, sizeof wanted);
    int64_t row = 0;
    for (; row + 2 <= num; row += 2) {
        const Pair mask = masks[bits[row >> 3] >> (row & 7) & 3];
        Pair old;
        std::memcpy(&old, found + row, sizeof old);
        old = (old & ~mask) | (wanted & mask);
        std::memcpy(found + row, &old, sizeof old);
    }
    if (row < num && bits[row >> 3] >> (row & 7) & 1) found[row] = value;
}
