#include "shares.h"

#include "idle.h"

#include <algorithm>
#include <limits>

namespace {

constexpr double TINY = std::numeric_limits<double>::min();

}  // namespace

ShareSearch::ShareSearch(const Problem& problem, const Packing& packing, const Levels& levels)
    : problem_(problem),
      packing_(packing),
      levels_(levels),
      num_devices_(problem.num_devices),
      num_words_((problem.num_devices + 63) / 64),
      sum_of_speed_(pairwise_sum(problem.speed, problem.num_devices)),
      group_of_(problem.num_experts),
      values_(std::max(problem.num_devices, problem.num_slots)),
      joined_(problem.num_devices * problem.num_devices, 0.0),
      degree_(problem.num_devices),
      place_(problem.num_devices),
      price_(problem.num_devices) {}

void ShareSearch::share_out(int64_t batch, double target) {
    if (levels_.num_share_steps == 0) return;
    loads_.of(problem_, packing_, batch);
    double best = loads_.largest();
    if (!(best > target) || !find_copies(batch)) return;
    set_loads();
    for (int64_t taken = 0; taken < levels_.num_share_steps; ++taken) {
        step();
        const double largest = set_loads();
        if (!(largest < best)) return;
        best = largest;
        for (const Copy& copy : copies_) {
            packing_.share[copy.at] = copy.share;
            packing_.work[copy.at] = copy.work;
        }
        if (!(largest > target)) return;
    }
}

// Finds the copies of experts with several ones, and what all others weigh; false where there are none.
bool ShareSearch::find_copies(int64_t batch) {
    const int64_t num_slots = problem_.num_slots, size = num_devices_ * num_slots;
    const int64_t* expert = packing_.expert + batch * size;
    num_copies_.assign(problem_.num_experts, 0);
    for (int64_t slot = 0; slot < size; ++slot) {
        if (expert[slot] != EMPTY) ++num_copies_[expert[slot]];
    }
    first_.assign(1, 0);
    for (int64_t what = 0; what < problem_.num_experts; ++what) {
        if (num_copies_[what] < 2) continue;
        group_of_[what] = int64_t(first_.size()) - 1;
        first_.push_back(first_.back() + num_copies_[what]);
    }
    copies_.clear();
    fixed_.resize(num_devices_);
    for (int64_t device = 0; device < num_devices_; ++device) {
        for (int64_t slot = 0; slot < num_slots; ++slot) {
            const int64_t at = batch * size + device * num_slots + slot, what = packing_.expert[at];
            values_[slot] = packing_.work[at];
            if (what == EMPTY || num_copies_[what] < 2) continue;
            values_[slot] = 0.0;
            const int64_t of_expert = batch * problem_.num_experts + what;
            const double log_idle = levels_.log_idle == nullptr ? 0.0 : levels_.log_idle[of_expert];
            copies_.push_back({device, at, group_of_[what], levels_.token_s[of_expert], levels_.idle[of_expert], log_idle,
                               packing_.share[at], 0.0, 0.0});
        }
        fixed_[device] = pairwise_sum(values_.data(), num_slots);
    }
    members_.resize(copies_.size());
    counts_.assign(first_.begin(), first_.end() - 1);
    for (int64_t copy = 0; copy < int64_t(copies_.size()); ++copy) members_[counts_[copies_[copy].group]++] = copy;
    return !copies_.empty();
}

double ShareSearch::work(const Copy& copy) const {
    double work = copy.token_s * copy.share;
    if (levels_.expert_s > 0 && copy.share > 0) {
        work += levels_.expert_s * (1 - idle_part(copy.idle, copy.log_idle, copy.share));
    }
    return work;
}

// Sets the work of copies and the loads of devices; returns the largest.
double ShareSearch::set_loads() {
    load_.assign(num_devices_, 0.0);
    for (Copy& copy : copies_) {
        copy.work = work(copy);
        load_[copy.device] += copy.work;
    }
    for (int64_t device = 0; device < num_devices_; ++device) {
        load_[device] = (fixed_[device] + load_[device]) / problem_.speed[device];
    }
    return *std::max_element(load_.begin(), load_.end());
}

// Takes a Newton step that leaves some of each share.
void ShareSearch::step() {
    for (int64_t device = 0; device < num_devices_; ++device) values_[device] = load_[device] * problem_.speed[device];
    const double mean_load = pairwise_sum(values_.data(), num_devices_) / sum_of_speed_;
    const double unit = mean_load > TINY ? mean_load : TINY;
    set_graph(unit);
    set_matrix();
    for (int64_t device = 0; device < num_devices_; ++device) {
        price_[place_[device]] = float((load_[device] / unit - 1) * problem_.speed[device]);
    }
    solve();
    mean_.assign(first_.size() - 1, 0.0);
    total_.assign(first_.size() - 1, 0.0);
    for (const Copy& copy : copies_) mean_[copy.group] += copy.share * double(price_[place_[copy.device]]);
    for (Copy& copy : copies_) {
        const double left = 1 - (double(price_[place_[copy.device]]) - mean_[copy.group]);
        copy.share *= left > levels_.kept ? left : levels_.kept;
        total_[copy.group] += copy.share;
    }
    for (Copy& copy : copies_) copy.share /= total_[copy.group] > TINY ? total_[copy.group] : TINY;
}

// Sets the weights with which experts join devices.
void ShareSearch::set_graph(double unit) {
    for (const int64_t cell : cells_) joined_[cell] = 0.0;
    cells_.clear();
    own_.assign(num_devices_, 0.0);
    for (Copy& copy : copies_) {
        copy.weight = copy.share * copy.token_s / unit;
        own_[copy.device] += copy.weight - copy.weight * copy.share;
    }
    for (size_t group = 0; group + 1 < first_.size(); ++group) {
        for (int64_t i = first_[group]; i < first_[group + 1]; ++i) {
            const Copy& one = copies_[members_[i]];
            for (int64_t j = i + 1; j < first_[group + 1]; ++j) {
                const Copy& other = copies_[members_[j]];
                const int64_t cell = one.device * num_devices_ + other.device;
                const double weight = one.weight * other.share;
                if (weight == 0.0) continue;
                if (joined_[cell] == 0.0) cells_.push_back(cell);
                joined_[cell] += weight;
            }
        }
    }
}

// Sets the upper half of the matrix, whose rows are devices in the order of their neighbours: those with few come first.
void ShareSearch::set_matrix() {
    degree_.assign(num_devices_, 0);
    for (const int64_t cell : cells_) {
        if (float(joined_[cell]) == 0.0f) continue;
        ++degree_[cell / num_devices_];
        ++degree_[cell % num_devices_];
    }
    // A stable sort by numbers below that of devices.
    counts_.assign(num_devices_ + 1, 0);
    for (const int64_t degree : degree_) ++counts_[degree + 1];
    for (int64_t degree = 0; degree < num_devices_; ++degree) counts_[degree + 1] += counts_[degree];
    for (int64_t device = 0; device < num_devices_; ++device) place_[device] = counts_[degree_[device]]++;
    matrix_.assign(num_devices_ * num_devices_, 0.0f);
    used_.assign(num_devices_ * num_words_, 0);
    for (int64_t device = 0; device < num_devices_; ++device) {
        matrix_[place_[device] * (num_devices_ + 1)] = float(own_[device] + levels_.ridge);
    }
    for (const int64_t cell : cells_) {
        const int64_t one = place_[cell / num_devices_], other = place_[cell % num_devices_];
        const int64_t row = std::min(one, other), column = std::max(one, other);
        matrix_[row * num_devices_ + column] = -float(joined_[cell]);
        used_[row * num_words_ + column / 64] |= uint64_t(1) << column % 64;
    }
}

// Calls `use` with the columns of a row that may not be zero, from the last one on.
template <typename Use>
void ShareSearch::for_columns(int64_t row, Use use) const {
    for (int64_t word = num_words_ - 1; word >= 0; --word) {
        for (uint64_t left = used_[row * num_words_ + word]; left != 0;) {
            const int64_t bit = 63 - __builtin_clzll(left);
            left ^= uint64_t(1) << bit;
            use(word * 64 + bit);
        }
    }
}

// Solves the symmetric system in `price_` by elimination without pivots, which need none: no row is larger than its
// diagonal. What is zero changes nothing, and is passed over.
void ShareSearch::solve() {
    const float least = float(levels_.ridge);  // rounding must not let a diagonal vanish
    for (int64_t k = 0; k < num_devices_; ++k) {
        float* row = matrix_.data() + k * num_devices_;
        row[k] = row[k] > least ? row[k] : least;
        for_columns(k, [&](int64_t i) {
            const float factor = row[i] / row[k];
            float* other = matrix_.data() + i * num_devices_;
            for (int64_t j = i; j < num_devices_; ++j) other[j] -= factor * row[j];
            const uint64_t* used = used_.data() + k * num_words_;
            uint64_t* fill = used_.data() + i * num_words_;
            fill[i / 64] |= used[i / 64] & (~uint64_t(1) << i % 64);  // the columns after i
            for (int64_t word = i / 64 + 1; word < num_words_; ++word) fill[word] |= used[word];
            price_[i] -= factor * price_[k];
        });
    }
    for (int64_t k = num_devices_ - 1; k >= 0; --k) {
        const float* row = matrix_.data() + k * num_devices_;
        float price = price_[k];
        for_columns(k, [&](int64_t i) { price -= row[i] * price_[i]; });
        price_[k] = price / row[k];
    }
}
