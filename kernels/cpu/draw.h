// Rows of logits to one token each: what kernels/drawing.py defines, in two passes over a row.
//
// Every filter keeps a prefix of the tokens in descending order, and the draw inverts the cumulative distribution in that
// order: so only the best tokens are looked at, those within some distance of the best one, and more of them where these do
// not decide.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "linear.h"

namespace arena {

// One entry a row.
struct DrawInput {
  const float* logits;  // [row][stride]
  int64_t stride;
  int32_t rows, vocab;
  const double *temperature, *top_p, *min_p, *chance;  // temperature 0: the best token
  const int32_t* top_k;                                // 0: all
  int32_t* tokens;                                     // -1: the best logit is not a finite number, or one is NaN
};

// Draws one row after another; one for each thread, as it keeps its buffers.
class Drawer {
 public:
  void reserve(int vocab) {
    maxima_.resize((vocab + kChunk - 1) / kChunk);
    weights_.resize(vocab + kLanes);
    best_.reserve(vocab);
  }

  int draw(const DrawInput& in, int row) {
    logits_ = in.logits + row * in.stride;
    vocab_ = in.vocab;
    if (!survey()) return -1;
    if (in.temperature[row] == 0) return first_of_best();
    const double total = weigh(in.temperature[row]), min_p = in.min_p[row];
    // All that top-k keeps has to be found before any of it is drawn, hence by strides that grow.
    const size_t top_k = in.top_k[row] < vocab_ ? std::max(in.top_k[row], 0) : 0;
    for (double reach = min_p > 0 ? -std::log(min_p) + kStep / 2 : kReach;; reach += top_k > 0 ? reach / 2 : kStep) {
      gather(highest_ - reach * in.temperature[row], static_cast<float>(min_p));
      size_t kept = best_.size();
      const bool enough = top_k > 0 && kept >= top_k;
      if (enough) std::nth_element(best_.begin(), best_.begin() + (kept = top_k) - 1, best_.end(), comes_before);
      const bool complete = enough || min_p > 0 || reach > kFarthest;
      if (top_k > 0 && !complete) continue;
      const int token = pick(kept, complete, total, in.top_p[row], in.chance[row]);
      if (token >= 0) return token;
    }
  }

 private:
  static constexpr int kChunk = 64;
  static constexpr double kReach = 4, kStep = 2;  // how far a token's (best - logit) / temperature may be
  static constexpr double kFarthest = 90;         // where weights are 0 in fp32
  static constexpr size_t kFew = 32;

  struct Candidate {
    float logit;
    int32_t token;
    float weight;
  };
  static bool comes_before(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
  }

  // The maximum of each chunk and of all; false where there is no finite best one, or a NaN.
  bool survey() {
    constexpr float kLowest = -std::numeric_limits<float>::infinity();
    int wrong = 0;
    highest_ = kLowest;
    for (int start = 0; start < vocab_; start += kChunk) {
      const int end = std::min(start + kChunk, vocab_);
      vf many = set(kLowest);
      int i = start;
      for (; i + kLanes <= end; i += kLanes) many = max(load(logits_ + i), many);
      float highest = max_of_lanes(many);
      for (; i < end; i++) highest = std::max(highest, logits_[i]);
      for (i = start; i < end; i++) wrong |= !(logits_[i] <= std::numeric_limits<float>::max());
      maxima_[start / kChunk] = highest;
      highest_ = std::max(highest_, highest);
    }
    return !wrong && highest_ > kLowest;
  }

  int first_of_best() const {
    int token = 0;
    while (maxima_[token / kChunk] < highest_) token += kChunk;
    while (logits_[token] < highest_) token++;
    return token;
  }

  // The probability of every token over that of the best one. Returns their sum.
  double weigh(double temperature) {
    const vf best = set(highest_), share = set(static_cast<float>(1 / temperature));
    double total = 0;
    for (int start = 0; start < vocab_; start += kLanes) {
      const int count = std::min(kLanes, vocab_ - start);
      float last[kLanes];
      if (count < kLanes) std::copy_n(logits_ + start, count, last);
      vf weight = exp(mul(sub(load(count < kLanes ? last : logits_ + start), best), share));
      if (count < kLanes) weight = keep_lanes(weight, 0, count, 0);
      store(weights_.data() + start, weight);
      total += sum_of_lanes(weight);
    }
    return total;
  }

  // The tokens whose logit is no lower than `limit`, in no order.
  void gather(double limit, float min_p) {
    best_.clear();
    for (int start = 0; start < vocab_; start += kChunk) {
      if (maxima_[start / kChunk] < limit) continue;
      for (int token = start; token < std::min(start + kChunk, vocab_); token++)
        if (logits_[token] >= limit && weights_[token] > 0 && weights_[token] >= min_p)
          best_.push_back({logits_[token], token, weights_[token]});
    }
  }

  // The token that `chance` falls on among the first `kept`, which are all there are where `complete`; -1 if it, or the
  // end of top-p, lies past them.
  int pick(size_t kept, bool complete, double total, double top_p, double chance) {
    if (complete) {
      total = 0;
      for (size_t i = 0; i < kept; i++) total += best_[i].weight;
    }
    if (top_p < 1) {
      const Place nucleus = find(kept, [&](double sum) { return sum >= top_p * total; });
      if (nucleus.number == kept && !complete) return -1;
      if (nucleus.number < kept) {
        kept = nucleus.number + 1;
        total = nucleus.sum;
        complete = true;
      }
    }
    const Place place = find(kept, [&](double sum) { return sum > chance * total; });
    if (place.number == kept && !complete) return -1;
    return best_[std::min(place.number, kept - 1)].token;
  }

  struct Place {
    size_t number;
    double sum;
  };

  // The first place among the first `count`, in order, where `passes` holds for the sum of the weights up to it; `count` if
  // for none. Puts in order no more than it must: halves are parted, and only one of them is looked at again.
  template <class Passes>
  Place find(size_t count, Passes passes) {
    const auto at = [&](size_t number) { return best_.begin() + number; };
    size_t first = 0, end = count;
    double sum = 0;
    while (end - first > kFew) {
      const size_t middle = (first + end) / 2;
      std::nth_element(at(first), at(middle), at(end), comes_before);
      double half = 0;
      for (size_t i = first; i < middle; i++) half += best_[i].weight;
      if (passes(sum + half)) {
        end = middle;
      } else {
        sum += half;
        first = middle;
      }
    }
    std::sort(at(first), at(end), comes_before);
    for (size_t i = first; i < end; i++)
      if (passes(sum += best_[i].weight)) return {i, sum};
    return {end < count ? end - 1 : count, sum};  // the half passed, its sum in another order does not: by a rounding
  }

  const float* logits_ = nullptr;
  int vocab_ = 0;
  float highest_ = 0;
  std::vector<float> maxima_, weights_;  // [chunk], [vocab]
  std::vector<Candidate> best_;
};

}  // namespace arena
