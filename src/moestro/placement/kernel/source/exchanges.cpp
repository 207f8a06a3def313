// The best exchange of copies between two devices, and rounds of them: `placement/search/packing.py` in C++.

#include "loads.h"
#include "search.h"
#include "shares.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

namespace {

constexpr double INFINITE = std::numeric_limits<double>::infinity();
constexpr double ROUNDING = 1e-6;  // of loads in single precision
constexpr int64_t LANES = 4;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// What a slot adds to the load of the first device, to that of the second, and to the floor.
struct Added {
    float first, second, floor;
};

struct Best {
    int64_t one, other;  // slots
    double gain;
};

// Finds the best exchange of pairs of devices. An object is the memory that the search of a pair needs.
class PairSearch {
   public:
    PairSearch(const Problem& problem, const Packing& packing)
        : problem_(problem), packing_(packing), num_lanes_(padded(problem.num_slots) / LANES), one_(problem.num_slots) {
        for (auto& each : other_) each.resize(num_lanes_);
        least_.resize(num_lanes_);
        at_.resize(num_lanes_);
    }

    // More than any exchange of a pair gains: it would make both devices level, and give back two received copies.
    double most_gain(int64_t batch, int64_t one, int64_t other, double floor) const {
        if (problem_.row_s != nullptr) return INFINITE;
        const double slow_one = 1 / problem_.speed[one], slow_other = 1 / problem_.speed[other];
        const double load_one = load(batch, one, slow_one), load_other = load(batch, other, slow_other);
        const double speed_one = problem_.speed[one], speed_other = problem_.speed[other];
        const double level = (load_one * speed_one + load_other * speed_other) / (speed_one + speed_other);
        const double now = std::max(std::max(load_one, load_other) - floor, 0.0);
        return now - std::max(level - floor, 0.0) + 2 * problem_.move_s + ROUNDING * (load_one + load_other + floor);
    }

    Best best(int64_t batch, int64_t one, int64_t other, double floor) {
        const double slow_one = 1 / problem_.speed[one], slow_other = 1 / problem_.speed[other];
        const double above_one = load(batch, one, slow_one) - floor;
        const double above_other = load(batch, other, slow_other) - floor;
        for (int64_t slot = 0; slot < problem_.num_slots; ++slot) {
            const double work = packing_.work[at(batch, one, slot)];
            const float cost_s = float(cost(batch, one, other, slot));
            one_[slot].first = float(above_one - work * slow_one) + cost_s;
            one_[slot].second = float(above_other + work * slow_other) + cost_s;
            one_[slot].floor = cost_s;
        }
        for (int64_t slot = 0; slot < num_lanes_ * LANES; ++slot) {
            if (slot < problem_.num_slots) {
                const double work = packing_.work[at(batch, other, slot)];
                const float cost_s = float(cost(batch, other, one, slot));
                set(other_[0], slot, float(work * slow_one) + cost_s);
                set(other_[1], slot, float(-(work * slow_other)) + cost_s);
                set(other_[2], slot, cost_s);
            } else {
                for (auto& each : other_) set(each, slot, float(INFINITE));
            }
        }
        const Best found = least_key();
        const double now = std::max(std::max(above_one, above_other), 0.0);
        return {found.one, found.other, now - found.gain};
    }

   private:
    static void set(std::vector<Floats>& values, int64_t slot, float value) { values[slot / LANES][slot % LANES] = value; }

    int64_t at(int64_t batch, int64_t device, int64_t slot) const {
        return (batch * problem_.num_devices + device) * problem_.num_slots + slot;
    }

    double load(int64_t batch, int64_t device, double slow) const {
        const double* work = packing_.work + at(batch, device, 0);
        double sum = 0;
        for (int64_t slot = 0; slot < problem_.num_slots; ++slot) sum += work[slot];
        return sum * slow;
    }

    // Seconds that sending a slot's copy to another device costs.
    double cost(int64_t batch, int64_t from, int64_t to, int64_t slot) const {
        if (!problem_.room[from * problem_.num_slots + slot]) return INFINITE;  // a slot that does not exist stays empty
        const int64_t expert = packing_.expert[at(batch, from, slot)];
        const int64_t base = expert_base(problem_, batch, expert), here = base + from, there = base + to;
        if (packing_.held[there]) return INFINITE;
        double cost_s = problem_.move_s * (int(problem_.moved[there]) - int(problem_.moved[here]));
        if (problem_.row_s != nullptr) {
            cost_s += (problem_.row_s[there] - problem_.row_s[here]) * packing_.share[at(batch, from, slot)];
        }
        return cost_s;
    }

    // The slots with the least key, the first ones among equals, and that key as `gain`.
    Best least_key() {
        const Floats infinite = Floats{} + float(INFINITE);
        std::fill(least_.begin(), least_.end(), infinite);
        std::fill(at_.begin(), at_.end(), Ints{});
        for (int64_t slot = 0; slot < problem_.num_slots; ++slot) {
            const Floats first = Floats{} + one_[slot].first, second = Floats{} + one_[slot].second;
            const Floats floor = Floats{} + one_[slot].floor;
            const Ints here = Ints{} + int32_t(slot);
            for (int64_t lane = 0; lane < num_lanes_; ++lane) {
                Floats key = first + other_[0][lane];
                const Floats term = second + other_[1][lane], flat = floor + other_[2][lane];
                key = key > term ? key : term;
                key = key > flat ? key : flat;
                const Ints is_less = key < least_[lane];
                least_[lane] = is_less ? key : least_[lane];
                at_[lane] = is_less ? here : at_[lane];
            }
        }
        Best best = {0, 0, INFINITE};
        float least = float(INFINITE);
        for (int64_t slot = 0; slot < problem_.num_slots; ++slot) {
            const float key = least_[slot / LANES][slot % LANES];
            const int64_t one = at_[slot / LANES][slot % LANES];
            if (key < least || (key == least && one < best.one)) {
                least = key;
                best = {one, slot, double(key)};
            }
        }
        return best;
    }

    const Problem& problem_;
    const Packing& packing_;
    const int64_t num_lanes_;
    std::vector<Added> one_;
    std::vector<Floats> other_[3];
    std::vector<Floats> least_;
    std::vector<Ints> at_;
};

void swap(const Problem& problem, const Packing& packing, int64_t batch, int64_t one, int64_t other, Best best) {
    const int64_t first = (batch * problem.num_devices + one) * problem.num_slots + best.one;
    const int64_t second = (batch * problem.num_devices + other) * problem.num_slots + best.other;
    const int64_t expert_one = packing.expert[first], expert_other = packing.expert[second];
    const int64_t base_one = expert_base(problem, batch, expert_one);
    const int64_t base_other = expert_base(problem, batch, expert_other);
    packing.held[base_one + one] = 0;
    packing.held[base_other + other] = 0;
    packing.held[base_one + other] = expert_one != EMPTY;
    packing.held[base_other + one] = expert_other != EMPTY;
    std::swap(packing.expert[first], packing.expert[second]);
    std::swap(packing.share[first], packing.share[second]);
    std::swap(packing.work[first], packing.work[second]);
}

// One batch of a round: its pairs in two rows, of which each one exchanges, or only the one that gains most.
bool exchange_pairs(PairSearch& search, const Problem& problem, const Packing& packing, int64_t batch, int64_t num_pairs,
                    const int64_t* one, const int64_t* other, double floor, double least_gain, bool is_one_each) {
    Best best = {0, 0, -INFINITE};
    int64_t best_pair = -1;
    bool has_gained = false;
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        const double least = best_pair < 0 ? least_gain * floor : best.gain;
        if (search.most_gain(batch, one[pair], other[pair], floor) <= least) continue;
        const Best found = search.best(batch, one[pair], other[pair], floor);
        if (!(found.gain > least_gain * floor)) continue;
        has_gained = true;
        if (!is_one_each) {  // no device is in two pairs
            swap(problem, packing, batch, one[pair], other[pair], found);
        } else if (found.gain > best.gain) {
            best = found;
            best_pair = pair;
        }
    }
    if (best_pair >= 0) swap(problem, packing, batch, one[best_pair], other[best_pair], best);
    return has_gained;
}

// Rounds of exchanges between heavy and light devices, until the largest load of each batch is low enough.
void balance(const Problem& problem, const Packing& packing, const Levels& levels, const std::vector<double>& largest,
             PairSearch& search) {
    const int64_t num_devices = problem.num_devices, cycle = levels.cycle;
    std::vector<int64_t> batch(problem.num_batches), left, heavy, light;
    std::vector<double> before(problem.num_batches, INFINITE);
    std::vector<Loads> loads(problem.num_batches);
    for (int64_t i = 0; i < problem.num_batches; ++i) batch[i] = i;
    for (int64_t turn = 0; turn < levels.num_rounds; ++turn) {
        int64_t num_heavy = 0;
        left.clear();
        for (const int64_t at : batch) {
            Loads& now = loads[at];
            now.of(problem, packing, at);
            const double above = now.largest() - largest[at] * (1 + levels.least_gain);
            bool is_left = above > 0;
            if (turn % cycle == 0) {
                is_left = is_left && above < (1 - levels.slow) * before[at];
                before[at] = above;
            }
            if (!is_left) continue;
            left.push_back(at);
            now.sort();
            num_heavy = std::max<int64_t>(num_heavy, std::count_if(now.load.begin(), now.load.end(),
                                                                   [&](double load) { return load > levels.each[at]; }));
        }
        batch.swap(left);
        if (batch.empty()) return;
        num_heavy = std::min(num_heavy, num_devices / 2);
        const bool is_one_each = turn % cycle == cycle - 1 || num_heavy == 1;
        const int64_t num_pairs = is_one_each ? num_devices - 1 : num_heavy;
        heavy.resize(num_pairs);
        light.resize(num_pairs);
        left.clear();
        for (const int64_t at : batch) {
            const std::vector<int64_t>& order = loads[at].order;
            for (int64_t pair = 0; pair < num_pairs; ++pair) {
                const int64_t nth = (pair + turn / cycle * (cycle - 1) + turn % cycle) % (num_devices - num_heavy);
                heavy[pair] = order[num_devices - 1 - (is_one_each ? 0 : pair)];
                light[pair] = order[is_one_each ? pair : nth];
            }
            const bool has_gained = exchange_pairs(search, problem, packing, at, num_pairs, heavy.data(), light.data(),
                                                   levels.each[at], levels.least_gain, is_one_each);
            if (has_gained || !is_one_each) left.push_back(at);
        }
        batch.swap(left);
    }
}

std::vector<double> largest_loads(const Problem& problem, const Packing& packing) {
    std::vector<double> largest(problem.num_batches);
    Loads loads;
    for (int64_t batch = 0; batch < problem.num_batches; ++batch) {
        loads.of(problem, packing, batch);
        largest[batch] = loads.largest();
    }
    return largest;
}

}  // namespace

void find_exchanges(const Problem& problem, const Packing& packing, const Pairs& pairs) {
    PairSearch search(problem, packing);
    for (int64_t pair = 0; pair < pairs.num_pairs; ++pair) {
        const Best best = search.best(pairs.batch[pair], pairs.one[pair], pairs.other[pair], pairs.floor[pair]);
        pairs.best_slots[pair] = best.one;
        pairs.best_slots[pairs.num_pairs + pair] = best.other;
        pairs.gain[pair] = best.gain;
    }
}

void level(const Problem& problem, const Packing& packing, const Levels& levels) {
    std::vector<double> goal(levels.largest, levels.largest + problem.num_batches);
    PairSearch search(problem, packing);
    ShareSearch shares(problem, packing, levels);
    for (int64_t part = 0; part < levels.num_parts; ++part) {
        const std::vector<double> before = largest_loads(problem, packing);
        balance(problem, packing, levels, goal, search);
        for (int64_t batch = 0; batch < problem.num_batches; ++batch) shares.share_out(batch, goal[batch]);
        const std::vector<double> after = largest_loads(problem, packing);
        bool are_all_over = true;
        for (int64_t batch = 0; batch < problem.num_batches; ++batch) {
            const bool has_stalled = before[batch] - after[batch] < levels.stalled * (before[batch] - goal[batch]);
            are_all_over &= has_stalled || after[batch] <= goal[batch] * (1 + levels.least_gain);
            if (has_stalled) goal[batch] = INFINITE;
        }
        if (are_all_over) return;
    }
}

void bring_near(const Problem& problem, const Packing& packing, const Turns& turns) {
    const int64_t num_devices = problem.num_devices, cycle = num_devices - 1 + num_devices % 2;
    PairSearch search(problem, packing);
    for (int64_t batch = 0; batch < problem.num_batches; ++batch) {
        // After a whole cycle without an exchange, the placement stays as it is.
        for (int64_t turn = 0, num_idle = 0; turn < turns.num_turns && num_idle < cycle; ++turn) {
            bool has_gained = false;
            for (int64_t one = 0; one < cycle; ++one) {
                int64_t other = ((turn - one) % cycle + cycle) % cycle;
                if (other == one && num_devices > cycle) other = cycle;
                if (one >= other) continue;
                has_gained |= exchange_pairs(search, problem, packing, batch, 1, &one, &other, turns.cap[batch],
                                             turns.least_gain, false);
            }
            num_idle = has_gained ? 0 : num_idle + 1;
        }
    }
}
