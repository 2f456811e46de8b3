// Speculative decoding with a tree of candidates. The model is a toy: one layer of attention over random vectors of 32
// words. The program generates the same words with and without the tree, and prints the number of calls of both.
#include <cstdio>
#include <span>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using namespace ssmax;

// Attention of a tree of candidates, in one call. Candidate i follows candidate parents[i], or the last key of the
// cache if parents[i] is -1.
void verify(KvCache<float>& cache, std::span<const index_t> parents, View<const float, 4> q,
            View<const float, 4> k, View<const float, 4> v, View<float, 4> out, const Rope<float>& rope) {
  const Tree tree(parents);
  cache.append(k, v, &rope, {}, tree.offsets());
  attention({.q = q, .keys = cache, .out = out, .rope = &rope}, SSMax<float>{0.43f}, tree);
}

// Keeps the keys of the accepted candidates, a branch from a root. Removes all other candidates.
void accept(KvCache<float>& cache, index_t committed, std::span<const index_t> branch) {
  std::vector<index_t> keys;
  for (index_t candidate : branch) keys.push_back(committed + candidate);
  cache.keep(0, committed, keys);
}

namespace {

constexpr index_t kWords = 32, kWidth = 16, kPrompt = 20, kGenerated = 60;

// The toy. Queries and keys are the words' vectors. The value of a word is the vector of the word that often follows.
struct Model {
  std::vector<float> vectors;
  Rope<float> rope{{.width = kWidth}, kPrompt + kGenerated + 10};

  explicit Model(examples::Random& random) : vectors(static_cast<std::size_t>(kWords * kWidth)) {
    for (float& x : vectors) x = random.standard();
  }
  static index_t follower(index_t word) { return (5 * word + 3) % kWords; }

  std::vector<float> rows(std::span<const index_t> words) const {
    std::vector<float> result;
    for (index_t word : words) {
      const auto row = vectors.begin() + word * kWidth;
      result.insert(result.end(), row, row + kWidth);
    }
    return result;
  }
  // Appends words to the cache. Returns the next word after each of them.
  std::vector<index_t> next(KvCache<float>& cache, std::span<const index_t> words,
                            std::span<const index_t> parents) const {
    std::vector<index_t> followers;
    for (index_t word : words) followers.push_back(follower(word));
    const std::vector<float> q = rows(words), v = rows(followers);
    std::vector<float> out(q.size());
    const View<const float, 4> q_view(q.data(), {1, 1, std::ssize(words), kWidth});
    verify(cache, parents, q_view, q_view, {v.data(), {1, 1, std::ssize(words), kWidth}},
           {out.data(), {1, 1, std::ssize(words), kWidth}}, rope);
    std::vector<index_t> result;
    for (index_t i = 0; i < std::ssize(words); ++i) result.push_back(nearest(out.data() + i * kWidth));
    return result;
  }
  // Returns the word whose vector has the largest product with `row`.
  index_t nearest(const float* row) const {
    index_t best = 0;
    float largest = 0;
    for (index_t word = 0; word < kWords; ++word) {
      float product = 0;
      for (index_t i = 0; i < kWidth; ++i)
        product += row[i] * vectors[static_cast<std::size_t>(word * kWidth + i)];
      if (word > 0 && product <= largest) continue;
      best = word;
      largest = product;
    }
    return best;
  }
};

// Returns one of two guesses of the next word. One of them is right for two words in three.
index_t draft(index_t word, index_t guess) { return (Model::follower(word) + (word + guess) % 3) % kWords; }

// Generates words after a prompt. Returns the words, and the number of calls in `calls`.
std::vector<index_t> generate(const Model& model, std::span<const index_t> prompt,
                              std::span<const index_t> parents, int& calls) {
  KvCache<float> cache({.width = kWidth, .capacity = kPrompt + kGenerated + 10});
  std::vector<index_t> chain;
  for (index_t i = 0; i < std::ssize(prompt); ++i) chain.push_back(i - 1);
  std::vector<index_t> result{model.next(cache, prompt, chain).back()};
  for (calls = 0; std::ssize(result) < kGenerated; ++calls) {
    // 1. Candidate 0 is the last word. The draft proposes two next words for a candidate: its first and second child.
    std::vector<index_t> words{result.back()};
    for (index_t i = 1; i < std::ssize(parents); ++i) {
      const index_t parent = parents[static_cast<std::size_t>(i)];
      words.push_back(draft(words[static_cast<std::size_t>(parent)], (i - 1) % 2));
    }
    // 2. Compute all candidates in one call.
    const index_t committed = cache.length(0);
    const std::vector<index_t> next = model.next(cache, words, parents);
    // 3. Follow the model's words through the tree.
    std::vector<index_t> branch{0};
    result.push_back(next[0]);
    for (index_t i = 1; i < std::ssize(words); ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (parents[at] != branch.back() || words[at] != result.back()) continue;
      branch.push_back(i);
      result.push_back(next[at]);
    }
    accept(cache, committed, branch);
  }
  result.resize(static_cast<std::size_t>(kGenerated));
  return result;
}

}  // namespace

int main() {
  examples::Check check;
  examples::Random random(1);
  const Model model(random);
  std::vector<index_t> prompt;
  for (index_t i = 0; i < kPrompt; ++i) prompt.push_back(random.below(kWords));
  int calls = 0, calls_with_tree = 0;
  const std::vector<index_t> one_by_one = generate(model, prompt, std::vector<index_t>{-1}, calls);
  const std::vector<index_t> with_tree =
      generate(model, prompt, std::vector<index_t>{-1, 0, 0, 1, 1, 2, 2}, calls_with_tree);
  std::printf("%td words: %d calls one by one, %d calls with a tree of 7 candidates\n", kGenerated, calls,
              calls_with_tree);
  check.holds("the tree generates the same words", with_tree == one_by_one);
  check.holds("the tree needs fewer calls", calls_with_tree < calls);
  return check.exit_code();
}
