// Steps of single copies by a layer's own price: `placement/search/by_price.py` in C++.
//
// Steps come in the same order, and the first one of equal ones is taken.

#include "search.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

namespace {

constexpr int64_t NONE = -1;
constexpr int NUM_WATCHED = 3;  // slowest and busiest devices that decide whether a step is tried; two may be left out
constexpr double ROUNDING = 1e-12;  // of a price, by which a bound may be too high

// One expert's part of a step: how many copies it gets more, and the devices that lose and get one.
struct Part {
    int64_t expert, more, leaves, enters;
};

struct Step {
    Part part[2];
    int64_t slot[2], then[2];  // slots, numbered over all devices, and what each then has
};

class Layer {
   public:
    Layer(const StepPrices& prices, int64_t layer, const int64_t* expert)
        : prices_(prices),
          num_experts_(prices.num_experts),
          num_devices_(prices.num_devices),
          num_slots_(prices.num_slots),
          work_s_(prices.work_s + layer * prices.num_experts * (prices.num_devices + 1)),
          near_s_(prices.near_s + layer * prices.num_experts * prices.num_devices),
          sooner_s_(prices.sooner_s + layer * prices.num_experts * prices.num_devices),
          moved_(prices.moved + layer * (prices.num_experts + 1) * prices.num_devices),
          expert_(expert, expert + prices.num_devices * prices.num_slots),
          held_(prices.num_experts * prices.num_devices, 0),
          in_node_(prices.num_experts * prices.num_devices, 0),
          copies_(prices.num_experts, 0),
          compute_s_(prices.num_devices, 0.0),
          rows_s_(prices.rest_s + layer * prices.num_devices, prices.rest_s + (layer + 1) * prices.num_devices),
          slowness_(prices.num_devices),
          inverse_(prices.num_devices + 1, 1.0),
          slowness_of_(prices.num_devices * prices.num_slots),
          device_of_(prices.num_devices * prices.num_slots),
          node_of_(prices.num_devices) {
        for (int64_t count = 1; count <= num_devices_; ++count) inverse_[count] = 1.0 / double(count);
        for (int64_t device = 0; device < num_devices_; ++device) {
            slowness_[device] = 1 / prices.speed[device];
            const auto node = std::find_if(nodes_.begin(), nodes_.end(),
                                           [&](const Node& each) { return same_node(each.devices[0], device); });
            node_of_[device] = node - nodes_.begin();
            if (node == nodes_.end()) {
                nodes_.push_back({{device}, 0.0, 0.0});
            } else {
                node->devices.push_back(device);
            }
            for (int64_t slot = 0; slot < num_slots_; ++slot) {
                device_of_[device * num_slots_ + slot] = device;
                slowness_of_[device * num_slots_ + slot] = slowness_[device];
                const int64_t what = expert_[device * num_slots_ + slot];
                if (what == EMPTY) continue;
                ++copies_[what];
                hold(what, device, true);
            }
        }
        for (int64_t what = 0; what < num_experts_; ++what) {
            const double share = 1.0 / double(std::max<int64_t>(copies_[what], 1));
            for (int64_t device = 0; device < num_devices_; ++device) {
                const int64_t at = what * num_devices_ + device;
                const double held = held_[at];
                compute_s_[device] += held * work(what, copies_[what]) * slowness_[device];
                rows_s_[device] += share * (held * near_s_[at] - sooner_s_[at] * double(in_node_[at]));
            }
        }
    }

    // Seconds per step, with those of the copies that devices have received.
    double price() const {
        int64_t received = 0;
        for (int64_t at = 0; at < num_experts_ * num_devices_; ++at) received += held_[at] & moved_[at];
        const double most_compute_s = *std::max_element(compute_s_.begin(), compute_s_.end());
        return most_compute_s + *std::max_element(rows_s_.begin(), rows_s_.end()) + double(received) * prices_.move_s;
    }

    const std::vector<int64_t>& expert() const { return expert_; }

    bool step(double least_gain) {
        slowest_ = std::max_element(compute_s_.begin(), compute_s_.end()) - compute_s_.begin();
        busiest_ = std::max_element(rows_s_.begin(), rows_s_.end()) - rows_s_.begin();
        const double now = compute_s_[slowest_] + rows_s_[busiest_];
        least_ = now - least_gain * now;
        has_found_ = false;
        set_highest();
        look_up_nodes();
        const Heaviest heaviest = {Largest(compute_s_), Largest(rows_s_), Largest(node_rows_s_)};
        for (int nth = 0; nth < NUM_WATCHED; ++nth) {
            slow_[nth] = std::max(heaviest.compute_s.at[nth], int64_t(0));
            busy_[nth] = std::max(heaviest.rows_s.at[nth], int64_t(0));
        }
        look_up_changes();
        try_steps_of(slowest_, heaviest);
        if (busiest_ != slowest_) try_steps_of(busiest_, heaviest);
        if (has_found_) take(best_);
        return has_found_;
    }

   private:
    double work(int64_t what, int64_t copies) const { return work_s_[what * (num_devices_ + 1) + copies]; }

    bool is_held(int64_t what, int64_t device) const { return held_[what * num_devices_ + device]; }

    bool same_node(int64_t one, int64_t other) const { return prices_.node_at[one] == prices_.node_at[other]; }

    void hold(int64_t what, int64_t device, bool is_held) {
        held_[what * num_devices_ + device] = is_held;
        for (int64_t other = 0; other < num_devices_; ++other) {
            if (same_node(device, other)) in_node_[what * num_devices_ + other] += is_held ? 1 : -1;
        }
    }

    // Largest values of devices or nodes, in falling order, as many as leave one when two are left out.
    struct Largest {
        int64_t at[NUM_WATCHED];
        double value[NUM_WATCHED];

        explicit Largest(const std::vector<double>& values) {
            for (int nth = 0; nth < NUM_WATCHED; ++nth) {
                at[nth] = NONE;
                value[nth] = 0.0;
                for (int64_t i = 0; i < int64_t(values.size()); ++i) {
                    if (i == at[0] || (nth == 2 && i == at[1])) continue;
                    if (at[nth] == NONE || values[i] > value[nth]) {
                        at[nth] = i;
                        value[nth] = values[i];
                    }
                }
            }
        }

        double without(int64_t one, int64_t other) const {
            int nth = 0;
            while (nth < 2 && (at[nth] == one || at[nth] == other)) ++nth;
            return value[nth];
        }
    };

    struct Heaviest {
        Largest compute_s, rows_s, node_rows_s;
    };

    // Rows of a slot's copy: what it adds to its own device and would add to another one, and what it saves the busiest
    // one while it is on that one's node.
    struct SlotCosts {
        double here_s, near_here_s, there_s, near_there_s, sooner_s;
    };

    // Seconds that a step adds at the `slow_` and at the `busy_` devices.
    struct Change {
        double compute_s[NUM_WATCHED], rows_s[NUM_WATCHED];
    };

    // What a slot's copy leaves behind if it goes: the slowest and the busiest other holder of its expert (NONE: there is
    // none), their seconds, and what the slot's own device then receives.
    struct Left {
        int64_t slowest, busiest;
        double compute_s, rows_s, here_rows_s;
    };

    struct Node {
        std::vector<int64_t> devices;
        double most_compute_s, most_rows_s;
    };

    void look_up_slots(int64_t device) {
        slots_.resize(num_devices_ * num_slots_);
        work_of_.assign(num_devices_ * num_slots_, 0.0);
        for (int64_t slot = 0; slot < num_devices_ * num_slots_; ++slot) {
            const int64_t what = expert_[slot];
            SlotCosts& costs = slots_[slot];
            costs = {};
            if (what == EMPTY) continue;
            const double share = inverse_[copies_[what]];
            const int64_t here = what * num_devices_ + device_of_[slot], there = what * num_devices_ + device;
            work_of_[slot] = work(what, copies_[what]);
            costs.here_s = share * near_s_[here];
            costs.near_here_s = share * (near_s_[here] - sooner_s_[here]);
            costs.there_s = share * near_s_[there];
            costs.near_there_s = share * (near_s_[there] - sooner_s_[there]);
            costs.sooner_s = share * sooner_s_[what * num_devices_ + busiest_];
        }
    }

    void look_up_nodes() {
        node_rows_s_.clear();
        for (Node& node : nodes_) {
            node.most_compute_s = node.most_rows_s = 0.0;
            for (const int64_t device : node.devices) {
                node.most_compute_s = std::max(node.most_compute_s, compute_s_[device]);
                node.most_rows_s = std::max(node.most_rows_s, rows_s_[device]);
            }
            node_rows_s_.push_back(node.most_rows_s);
        }
    }

    // What one copy more of each expert changes at the watched devices, and one fewer in each spare slot.
    void look_up_changes() {
        added_.resize(num_experts_);
        for (int64_t what = 0; what < num_experts_; ++what) {
            added_[what] = copies_[what] < num_devices_ ? scaled(what, copies_[what] + 1) : Change{};
        }
        dropped_.resize(num_devices_ * num_slots_);
        left_.resize(num_devices_ * num_slots_);
        look_up_holders();
        for (int64_t slot = 0; slot < num_devices_ * num_slots_; ++slot) {
            const int64_t what = expert_[slot], device = device_of_[slot];
            dropped_[slot] = {};
            left_[slot] = {NONE, NONE, 0.0, 0.0, rows_s_[device]};
            if (what == EMPTY || copies_[what] < 2) continue;
            const int64_t then = copies_[what] - 1;
            Change& change = dropped_[slot] = scaled(what, then);
            for (int nth = 0; nth < NUM_WATCHED; ++nth) {
                if (device == slow_[nth]) change.compute_s[nth] -= work(what, then) * slowness_[device];
                const int64_t at = what * num_devices_ + busy_[nth];
                if (device == busy_[nth]) change.rows_s[nth] -= inverse_[then] * near_s_[at];
                if (same_node(device, busy_[nth])) change.rows_s[nth] += inverse_[then] * sooner_s_[at];
            }
            left_[slot] = left_by(what, device);
        }
    }

    // Writes the devices of each expert's copies one after the other.
    void look_up_holders() {
        first_holder_.assign(num_experts_ + 1, 0);
        for (int64_t what = 0; what < num_experts_; ++what) first_holder_[what + 1] = first_holder_[what] + copies_[what];
        holders_.resize(first_holder_[num_experts_]);
        std::vector<int64_t> next(first_holder_.begin(), first_holder_.end() - 1);
        for (int64_t slot = 0; slot < num_devices_ * num_slots_; ++slot) {
            if (expert_[slot] != EMPTY) holders_[next[expert_[slot]]++] = device_of_[slot];
        }
    }

    // What is left when the copy of an expert with several goes from a device.
    Left left_by(int64_t what, int64_t device) const {
        const int64_t now = copies_[what], then = now - 1;
        const double more_s = work(what, then) - work(what, now), more = inverse_[then] - inverse_[now];
        Left left = {NONE, NONE, 0.0, 0.0, 0.0};
        for (int64_t nth = first_holder_[what]; nth < first_holder_[what + 1]; ++nth) {
            const int64_t other = holders_[nth], at = what * num_devices_ + other;
            double rows_s = rows_s_[other] + more * (near_s_[at] - sooner_s_[at] * double(in_node_[at]));
            if (same_node(device, other)) rows_s += inverse_[then] * sooner_s_[at];
            if (other == device) {
                left.here_rows_s = rows_s - inverse_[then] * near_s_[at];
                continue;
            }
            const double compute_s = compute_s_[other] + more_s * slowness_[other];
            if (left.slowest == NONE || compute_s > left.compute_s) {
                left.slowest = other;
                left.compute_s = compute_s;
            }
            if (left.busiest == NONE || rows_s > left.rows_s) {
                left.busiest = other;
                left.rows_s = rows_s;
            }
        }
        return left;
    }

    // What the copies that stay change at the watched devices if there are other numbers of them.
    Change scaled(int64_t what, int64_t then) const {
        const int64_t now = copies_[what];
        const double more_s = work(what, then) - work(what, now), more = inverse_[then] - inverse_[now];
        Change change;
        for (int nth = 0; nth < NUM_WATCHED; ++nth) {
            const int64_t slow = what * num_devices_ + slow_[nth], busy = what * num_devices_ + busy_[nth];
            change.compute_s[nth] = double(held_[slow]) * more_s * slowness_[slow_[nth]];
            change.rows_s[nth] = more * (double(held_[busy]) * near_s_[busy] - sooner_s_[busy] * double(in_node_[busy]));
        }
        return change;
    }

    // Lower bound of the price after an expert gets a further copy in a slot: by the watched devices, the slot's own, and
    // those that do more for the expert whose copy goes.
    double bound_of_further(int64_t what, int64_t to) const {
        const int64_t there = device_of_[to], then = copies_[what] + 1, other = expert_[to];
        const Change &added = added_[what], &dropped = dropped_[to];
        const double work_s = work(what, then) * slowness_[there];
        double most_s = compute_s_[there] + work_s;
        if (other != EMPTY) most_s -= work(other, copies_[other]) * slowness_[there];
        const double share = inverse_[then];
        double most_rows_s = 0.0;
        for (int nth = 0; nth < NUM_WATCHED; ++nth) {
            const double others_s = compute_s_[slow_[nth]] + added.compute_s[nth] + dropped.compute_s[nth];
            most_s = std::max(most_s, there == slow_[nth] ? others_s + work_s : others_s);
            const int64_t busy = busy_[nth], at = what * num_devices_ + busy;
            double rows_s = rows_s_[busy] + added.rows_s[nth] + dropped.rows_s[nth];
            if (there == busy) rows_s += share * near_s_[at];
            if (same_node(there, busy)) rows_s -= share * sooner_s_[at];
            most_rows_s = std::max(most_rows_s, rows_s);
            if (most_s + most_rows_s > highest_) return most_s + most_rows_s;
        }
        const Left& left = left_[to];
        most_rows_s = std::max(most_rows_s, left.here_rows_s + added_rows_s(what, there, there));
        if (left.slowest != NONE) {
            const double less_s = work(what, copies_[what]) - work(what, then);
            const double held = held_[what * num_devices_ + left.slowest];
            most_s = std::max(most_s, left.compute_s - held * less_s * slowness_[left.slowest]);
            most_rows_s = std::max(most_rows_s, left.rows_s + added_rows_s(what, there, left.busiest));
        }
        return most_s + most_rows_s;
    }

    // What a further copy of an expert, on the device `there`, adds to what a device receives.
    double added_rows_s(int64_t what, int64_t there, int64_t device) const {
        const int64_t at = what * num_devices_ + device;
        const double share = inverse_[copies_[what] + 1], more = share - inverse_[copies_[what]];
        double added_s = more * (double(held_[at]) * near_s_[at] - sooner_s_[at] * double(in_node_[at]));
        if (there == device) added_s += share * near_s_[at];
        if (same_node(there, device)) added_s -= share * sooner_s_[at];
        return added_s;
    }

    void attempt_further(int64_t what, int64_t to) {
        if (bound_of_further(what, to) <= highest_) attempt(further(what, to));
    }

    // Writes for each slot what is left of a price if its copy and one of `device` are exchanged: the seconds of its own
    // device, and the most of those that stay as they are.
    void look_up_floors(int64_t device, const Heaviest& heaviest) {
        const int64_t num_all = num_devices_ * num_slots_;
        compute_of_.resize(num_all);
        others_s_.resize(num_all);
        others_rows_s_.resize(num_all);
        floor_s_.resize(num_all);
        for (int64_t there = 0, to = 0; there < num_devices_; ++there) {
            // Between nodes, receivers on both change, too.
            const double rows_s = same_node(device, there)
                                      ? heaviest.rows_s.without(device, there)
                                      : heaviest.node_rows_s.without(node_of_[device], node_of_[there]);
            const double compute_s = heaviest.compute_s.without(device, there);
            for (int64_t slot = 0; slot < num_slots_; ++slot, ++to) {
                compute_of_[to] = compute_s_[there];
                others_s_[to] = compute_s;
                others_rows_s_[to] = rows_s;
            }
        }
    }

    // Lower bounds of the price after a copy of `device` is exchanged for those of all slots: by the devices that compute.
    void set_floors(int64_t device, double work_s) {
        const int64_t num_all = num_devices_ * num_slots_;
        const double here_s = compute_s_[device], slowness = slowness_[device];
        const double *works = work_of_.data(), *computes = compute_of_.data(), *slow = slowness_of_.data();
        const double *others = others_s_.data(), *rows = others_rows_s_.data();
        double* floors = floor_s_.data();
        for (int64_t to = 0; to < num_all; ++to) {
            const double first_s = here_s + (works[to] - work_s) * slowness;
            const double second_s = computes[to] + (work_s - works[to]) * slow[to];
            floors[to] = std::max(std::max(first_s, second_s), others[to]) + rows[to];
        }
    }

    // A closer bound than `floor_s_`, by what both devices and the busiest one receive.
    double bound(int64_t device, int64_t slot, int64_t to) const {
        const int64_t there = device_of_[to], what = expert_[slot];
        const SlotCosts &one = slots_[slot], &other = slots_[to];
        const bool is_same = same_node(device, there);
        double least_s = others_rows_s_[to];
        if (!is_same && busiest_ != device && busiest_ != there) {
            double busiest_s = rows_s_[busiest_];
            if (same_node(device, busiest_)) busiest_s += one.sooner_s - other.sooner_s;
            if (same_node(there, busiest_)) busiest_s -= one.sooner_s - other.sooner_s;
            least_s = std::max(least_s, busiest_s);
        }
        const double share = inverse_[copies_[what]];
        const int64_t at = what * num_devices_ + there;
        const double arriving_s = share * (is_same ? near_s_[at] : near_s_[at] - sooner_s_[at]);
        const double first_rows_s = rows_s_[device] + (is_same ? other.there_s - one.here_s : other.near_there_s - one.near_here_s);
        const double second_rows_s = rows_s_[there] + arriving_s - (is_same ? other.here_s : other.near_here_s);
        return floor_s_[to] + (std::max(std::max(first_rows_s, second_rows_s), least_s) - others_rows_s_[to]);
    }

    void try_steps_of(int64_t device, const Heaviest& heaviest) {
        const int64_t num_all = num_devices_ * num_slots_;
        look_up_slots(device);
        look_up_floors(device, heaviest);
        for (int64_t slot = device * num_slots_; slot < (device + 1) * num_slots_; ++slot) {
            const int64_t what = expert_[slot];
            if (what != EMPTY) {
                set_floors(device, work_of_[slot]);
                for (int64_t to = 0; to < num_all; ++to) {
                    if (floor_s_[to] > highest_ || !prices_.room[to]) continue;
                    const int64_t there = device_of_[to], other = expert_[to];
                    if (is_held(what, there) || (other != EMPTY && is_held(other, device))) continue;
                    if (bound(device, slot, to) > highest_) continue;
                    Step step = {{{what, 0, device, there}, {NONE, 0, NONE, NONE}}, {slot, to}, {other, what}};
                    if (other != EMPTY) step.part[1] = {other, 0, there, device};
                    attempt(step);
                }
                for (int64_t to = 0; to < num_all; ++to) {
                    if (is_spare(to) && !is_held(what, device_of_[to])) attempt_further(what, to);
                }
                if (copies_[what] > 1) {
                    attempt({{{what, -1, device, NONE}, {NONE, 0, NONE, NONE}}, {slot, NONE}, {EMPTY, NONE}});
                }
            }
            if (!is_spare(slot)) continue;
            for (int64_t more = 0; more < num_experts_; ++more) {
                if (!is_held(more, device)) attempt_further(more, slot);
            }
        }
    }

    bool is_spare(int64_t slot) const {
        return expert_[slot] == EMPTY ? prices_.room[slot] : copies_[expert_[slot]] > 1;
    }

    Step further(int64_t what, int64_t to) const {
        const int64_t there = device_of_[to], other = expert_[to];
        Step step = {{{what, 1, NONE, there}, {NONE, 0, NONE, NONE}}, {to, NONE}, {what, NONE}};
        if (other != EMPTY) step.part[1] = {other, -1, there, NONE};
        return step;
    }

    double moving_s(const Step& step) const {
        int64_t received = 0;
        for (const Part& part : step.part) {
            if (part.expert == NONE) continue;
            const uint8_t* moved = moved_ + part.expert * num_devices_;
            if (part.enters != NONE) received += moved[part.enters];
            if (part.leaves != NONE) received -= moved[part.leaves];
        }
        // Where nothing may be received, what is received less earns nothing.
        if (!prices_.may_receive) return received > 0 ? std::numeric_limits<double>::infinity() : 0.0;
        return double(received) * prices_.move_s;
    }

    void after(const Step& step, int64_t device, double& compute_s, double& rows_s) const {
        compute_s = compute_s_[device];
        rows_s = rows_s_[device];
        for (const Part& part : step.part) {
            if (part.expert == NONE) continue;
            const int64_t at = part.expert * num_devices_ + device;
            const int64_t now = copies_[part.expert], then = now + part.more;
            const double share = inverse_[then], held = held_[at];
            const double work_s = work(part.expert, then);
            if (part.more != 0) {
                compute_s += held * (work_s - work(part.expert, now)) * slowness_[device];
                rows_s += (share - inverse_[now]) * (held * near_s_[at] - sooner_s_[at] * double(in_node_[at]));
            }
            if (part.leaves != NONE) {
                if (part.leaves == device) compute_s -= work_s * slowness_[device];
                if (part.leaves == device) rows_s -= share * near_s_[at];
                if (same_node(part.leaves, device)) rows_s += share * sooner_s_[at];
            }
            if (part.enters != NONE) {
                if (part.enters == device) compute_s += work_s * slowness_[device];
                if (part.enters == device) rows_s += share * near_s_[at];
                if (same_node(part.enters, device)) rows_s -= share * sooner_s_[at];
            }
        }
    }

    // Whether a step changes any device of a node, of which `device` is one: the others need no new price.
    bool is_changed(const Step& step, int64_t device) const {
        for (const Part& part : step.part) {
            if (part.expert == NONE) continue;
            if (part.leaves != NONE && same_node(part.leaves, device)) return true;
            if (part.enters != NONE && same_node(part.enters, device)) return true;
            // With another number of copies, all devices change that hold one or have one on their node.
            if (part.more != 0 && in_node_[part.expert * num_devices_ + device] > 0) return true;
        }
        return false;
    }

    void attempt(const Step& step) {
        const double move_s = moving_s(step);
        double compute_s, rows_s, most_compute_s = 0.0, most_rows_s = 0.0;
        // Devices that decide most often come first.
        const int64_t probes[] = {slow_[0], slow_[1], slow_[2], step.part[0].enters, step.part[1].enters,
                                  busy_[0], busy_[1], busy_[2], step.part[0].leaves, step.part[1].leaves};
        for (const int64_t device : probes) {
            if (device == NONE) continue;
            after(step, device, compute_s, rows_s);
            most_compute_s = std::max(most_compute_s, compute_s);
            most_rows_s = std::max(most_rows_s, rows_s);
            if (!(most_compute_s + most_rows_s + move_s < least_)) return;
        }
        for (Node& node : nodes_) {
            if (!is_changed(step, node.devices[0])) {
                most_compute_s = std::max(most_compute_s, node.most_compute_s);
                most_rows_s = std::max(most_rows_s, node.most_rows_s);
                if (!(most_compute_s + most_rows_s + move_s < least_)) return;
                continue;
            }
            for (const int64_t device : node.devices) {
                after(step, device, compute_s, rows_s);
                most_compute_s = std::max(most_compute_s, compute_s);
                most_rows_s = std::max(most_rows_s, rows_s);
                if (!(most_compute_s + most_rows_s + move_s < least_)) return;
            }
        }
        least_ = most_compute_s + most_rows_s + move_s;
        best_ = step;
        has_found_ = true;
        set_highest();
    }

    // A step may receive two copies fewer than before, and a bound may be rounded up.
    void set_highest() {
        highest_ = least_ * (1 + ROUNDING) + (prices_.may_receive ? 2 * prices_.move_s : 0.0);
    }

    void take(const Step& step) {
        for (int64_t device = 0; device < num_devices_; ++device) {
            double compute_s, rows_s;
            after(step, device, compute_s, rows_s);
            next_compute_s_.push_back(compute_s);
            next_rows_s_.push_back(rows_s);
        }
        compute_s_.swap(next_compute_s_);
        rows_s_.swap(next_rows_s_);
        next_compute_s_.clear();
        next_rows_s_.clear();
        for (int side = 0; side < 2; ++side) {
            if (step.slot[side] != NONE) expert_[step.slot[side]] = step.then[side];
        }
        for (const Part& part : step.part) {
            if (part.expert == NONE) continue;
            copies_[part.expert] += part.more;
            if (part.leaves != NONE) hold(part.expert, part.leaves, false);
            if (part.enters != NONE) hold(part.expert, part.enters, true);
        }
    }

    const StepPrices& prices_;
    const int64_t num_experts_, num_devices_, num_slots_;
    const double *work_s_, *near_s_, *sooner_s_;
    const uint8_t* moved_;
    std::vector<int64_t> expert_;
    std::vector<uint8_t> held_;
    std::vector<int64_t> in_node_, copies_;
    std::vector<double> compute_s_, rows_s_, next_compute_s_, next_rows_s_, slowness_;
    int64_t slowest_ = 0, busiest_ = 0, slow_[NUM_WATCHED] = {}, busy_[NUM_WATCHED] = {};
    double least_ = 0.0, highest_ = 0.0;
    bool has_found_ = false;
    Step best_ = {};
    std::vector<Node> nodes_;
    std::vector<SlotCosts> slots_;
    std::vector<Change> added_, dropped_;
    std::vector<Left> left_;
    std::vector<int64_t> holders_, first_holder_;
    std::vector<double> inverse_, node_rows_s_;
    std::vector<double> slowness_of_, work_of_, compute_of_, others_s_, others_rows_s_, floor_s_;  // of slots
    std::vector<int64_t> device_of_, node_of_;  // device of each slot, and index in `nodes_` of each device
};

}  // namespace

void lower_prices(const StepPrices& prices) {
    const int64_t size = prices.num_devices * prices.num_slots, num_starts = prices.num_starts;
    for (int64_t at = 0; at < prices.num_layers; ++at) {
        std::vector<Layer> layers;
        std::vector<double> price_s;
        layers.reserve(num_starts);
        for (int64_t nth = 0; nth < num_starts; ++nth) {
            layers.emplace_back(prices, at, prices.starts + (nth * prices.num_layers + at) * size);
            price_s.push_back(layers.back().price());
        }
        std::vector<int64_t> order(num_starts);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int64_t one, int64_t other) { return price_s[one] < price_s[other]; });
        double least = std::numeric_limits<double>::infinity();
        for (int64_t nth = 0; nth < std::min(prices.num_best, num_starts); ++nth) {
            Layer& layer = layers[order[nth]];
            for (int64_t taken = 0; taken < prices.num_steps && layer.step(prices.least_gain); ++taken) {
            }
            if (nth > 0 && !(layer.price() < least)) continue;
            least = layer.price();
            std::copy(layer.expert().begin(), layer.expert().end(), prices.best + at * size);
        }
    }
}
