// cross_entropy throws std::invalid_argument that names the argument, before it writes.

#include "cross_entropy_problem.hpp"
#include "refusal.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace cross_entropy_problem::cross_entropy_errors_test {

using test_executors::Reverse;

struct Buffers {
  std::vector<float> logits = std::vector<float>(1 << 10, sentinel<float>());
  std::vector<float> dlogits = logits;
  std::vector<index_t> targets{0, 1, 7, 3};

  View<float, 2> in(std::array<index_t, 2> extents = {4, 8}) { return {logits.data() + 64, extents}; }
  View<float, 2> out(std::array<index_t, 2> extents = {4, 8}) { return {dlogits.data() + 64, extents}; }

  /// Checks that the call throws a message with all the words and leaves its outputs unchanged.
  void refused(const View<const float, 2>& from, std::span<const index_t> to, const View<float, 2>& gradient,
               std::initializer_list<std::string_view> words, index_t ignored_target = ignored) {
    index_t runs = 0;
    const std::vector<index_t> before = targets;
    const auto call = [&] {
      cross_entropy<float>(from, to, gradient, {.ignored = ignored_target}, Reverse{4, &runs});
    };
    CHECK(refusal(call).find("ssmax::cross_entropy: ") == 0);
    check_refused_with_words(words, call);
    const auto untouched = [](float x) { return x == sentinel<float>(); };
    CHECK(std::all_of(logits.begin(), logits.end(), untouched));
    CHECK(std::all_of(dlogits.begin(), dlogits.end(), untouched));
    CHECK(targets == before);
    CHECK(runs == 0);
  }
};

TEST_CASE("cross_entropy throws for mismatched shapes", "[cross_entropy][errors]") {
  Buffers m;
  const auto& t = m.targets;
  const std::span<const index_t> all(t);
  for (const View<float, 2>& gradient : {m.out(), View<float, 2>()}) {
    m.refused(m.in({5, 8}), t, gradient, {"targets", "4", "logits", "5"});
    m.refused(m.in({3, 8}), t, gradient, {"targets", "4", "logits", "3"});
    m.refused(m.in(), {}, gradient, {"targets", "0", "logits", "4"});
    m.refused({}, t, gradient, {"targets", "4", "logits", "0"});
    m.refused(m.in({4, -1}), t, gradient, {"logits", "-1", "0"});
    m.refused(m.in({-4, 8}), t, gradient, {"logits", "-4", "0"});
    m.refused({m.logits.data(), {4, 8}, {16, 2}}, t, gradient, {"logits", "stride", "2", "1"});
    m.refused({nullptr, {4, 8}}, t, gradient, {"logits", "null", "32", "0"});
  }
  m.refused(m.in(), t, m.out({5, 8}), {"dlogits", "5", "logits", "4"});
  m.refused(m.in(), t, m.out({3, 8}), {"dlogits", "3", "logits", "4"});
  m.refused(m.in(), t, m.out({4, 7}), {"dlogits", "7", "logits", "8"});
  m.refused(m.in(), t, m.out({4, 9}), {"dlogits", "9", "logits", "8"});
  m.refused(m.in(), t, m.out({0, 0}), {"dlogits", "0", "logits", "4"});
  m.refused(m.in(), t, m.out({4, -8}), {"dlogits", "-8", "0"});
  m.refused(m.in(), t, {m.dlogits.data(), {4, 8}, {24, 3}}, {"dlogits", "stride", "3", "1"});
  m.refused(m.in(), t, {m.dlogits.data(), {4, 8}, {0, 1}}, {"dlogits", "stride", "0", "1"});
  m.refused(m.in(), t, {m.dlogits.data(), {4, 8}, {7, 1}}, {"dlogits", "stride", "7", "8"});
  m.refused(m.in(), t, {nullptr, {4, 8}}, {"dlogits", "null", "32", "0"});
  m.refused(m.in({0, 8}), all.first(0), {nullptr, {0, 7}}, {"dlogits", "7", "logits", "8"});
}

TEST_CASE("cross_entropy throws for partly overlapping memory", "[cross_entropy][errors]") {
  Buffers m;
  const auto& t = m.targets;
  m.refused(m.in(), t, {m.logits.data() + 65, {4, 8}}, {"dlogits", "logits", "128", "124"});
  m.refused(m.in(), t, {m.logits.data() + 40, {4, 8}}, {"dlogits", "logits", "128", "32"});
  m.refused(m.in(), t, {m.logits.data() + 64, {4, 8}, {16, 1}}, {"dlogits", "logits", "224", "128"});
  // The gradient's rows overlap the targets.
  auto* over_targets = reinterpret_cast<float*>(m.targets.data());
  m.refused(m.in({4, 1}), std::span<const index_t>(t), {over_targets, {4, 1}},
            {"dlogits", "targets", "16", "32"});
}

TEST_CASE("cross_entropy throws for a target that is not a class and names its row",
          "[cross_entropy][errors]") {
  constexpr index_t lowest = std::numeric_limits<index_t>::min(),
                    highest = std::numeric_limits<index_t>::max();
  Buffers m;
  for (const View<float, 2>& gradient : {m.out(), View<float, 2>(), m.in()}) {
    const auto refused = [&](std::vector<index_t> targets, std::initializer_list<std::string_view> words,
                             index_t ignored_target = ignored) {
      m.targets = std::move(targets);
      m.refused(m.in(), m.targets, gradient, words, ignored_target);
    };
    refused({0, 1, 8, 3}, {"targets", "class", "8", "row", "2", "logits"});
    refused({0, 1, 2, 99}, {"targets", "99", "row", "3", "logits", "8"});
    refused({-1, 1, 2, 3}, {"targets", "-1", "row", "0", "logits", "8"});
    refused({0, highest, 2, 3}, {"targets", "9223372036854775807", "row", "1", "8"});
    refused({0, lowest, 2, 3}, {"targets", "-9223372036854775808", "row", "1", "8"});
    refused({ignored, ignored, 2, 9}, {"targets", "9", "row", "3", "8"});
    refused({0, 1, 2, -100}, {"targets", "-100", "row", "3", "8"}, -1);
    refused({5, 12, -3, 44}, {"targets", "12", "row", "1", "8"});  // the first
  }
  m.targets = {ignored, 0, ignored};
  m.refused(m.in({3, 0}), m.targets, m.out({3, 0}), {"targets", "class", "0", "row", "1", "logits"});
}

}  // namespace cross_entropy_problem::cross_entropy_errors_test
