// Compares the bits and the times of two commits: README.md.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <iterator>
#include <map>
#include <oracle/case.hpp>
#include <stdexcept>

namespace oracle {
namespace {

constexpr const char* views[] = {"attention", "partial", "plan", "backward"};
constexpr const char* sources[] = {"decode", "paged_cache", "pages", "indexed"};
constexpr const char* rows[] = {"softmax",          "log_softmax",          "logsumexp",     "functor",
                                "softmax_backward", "log_softmax_backward", "cross_entropy", "entmax"};

template <class Names>
bool contains(const Names& names, const std::string& name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

Case draw(const std::string& kind, std::uint64_t seed) {
  Random random(seed);
  Case c{.kind = kind, .seed = random.next()};
  const bool is_row = contains(rows, kind), is_source = contains(sources, kind);
  const auto width = [&] {
    return random.chance(50) ? random.between(1, 80) : index_t{8} << random.between(0, 4);
  };
  c.type = static_cast<int>(random.between(0, 3));
  c.stored = static_cast<int>(random.between(0, 5));
  c.policy = static_cast<int>(random.between(0, 5));
  c.special = random.chance(10) ? 2 : 0;
  c.threads = random.chance(40) ? 3 : 1;
  c.kv_heads = random.between(1, 3);
  c.heads = c.kv_heads * (is_row || random.chance(50) ? 1 : random.chance(80) ? random.between(2, 4) : 8);
  c.d = width();
  c.dv = random.chance(60) ? c.d : width();
  if (is_source && c.stored == 3) c.d = c.dv = 32 * random.between(1, 3);  // Q8_0 has groups of 32
  c.gap = random.chance(30) ? random.between(1, 9) : 0;
  c.by_position = random.chance(50);
  c.page = random.between(1, 40);
  c.window = random.between(0, 200);
  bool* const flags[] = {&c.sinks,           &c.scaled_sinks, &c.float_products, &c.rounded_rotation,
                         &c.batch_invariant, &c.workspace,    &c.accumulate};
  for (bool* flag : flags) *flag = random.chance(30);
  if (kind == "partial" || !c.sinks) c.scaled_sinks = false;
  // More queries than keys, or no keys, where no rope rotates a query to a position below 0.
  const bool few_keys = contains(views, kind) && random.chance(15);
  c.rope = !is_row && !few_keys && c.d > 1 && kind != "pages" && kind != "indexed" && random.chance(30);
  if (kind != "partial" && !is_row) c.lengths = Lengths(std::max<index_t>(0, random.between(-2, 2)));
  c.batch = random.between(1, 3);
  for (index_t i = 0; i < c.batch; ++i) {
    const bool same = i > 0 && c.lengths == Lengths::none;  // for every sequence
    const index_t drawn = random.chance(50) ? random.between(0, 6) : random.between(7, 70);
    const index_t queries = same ? c.queries_of[0] : drawn;
    const index_t most = queries > 20 || random.chance(70) ? 300 : random.chance(60) ? 1500 : 2600;
    const index_t keys =
        few_keys ? random.between(0, queries) : random.between(std::max<index_t>(queries, 1), most);
    c.queries_of.push_back(queries);
    c.keys_of.push_back(same && !is_source ? c.keys_of[0] : keys);
  }
  const auto extent = [&](const std::vector<index_t>& numbers) {
    if (c.lengths != Lengths::packed) return *std::max_element(numbers.begin(), numbers.end());
    index_t sum = 0;
    for (const index_t n : numbers) sum += n;
    return sum;
  };
  c.queries = extent(c.queries_of);
  c.keys = extent(c.keys_of);
  if (c.lengths == Lengths::packed) c.batch = 1;
  c.cut = random.chance(50) ? random.between(0, c.keys) : c.keys / 1024 * 1024;
  return c;
}

void print(const Case& c) {
  std::printf(
      "type %d stored %d policy %d special %d threads %d batch %td heads %td kv_heads %td queries %td keys "
      "%td d %td dv %td lengths %d gap %td by_position %d cut %td page %td window %td ",
      c.type, c.stored, c.policy, c.special, c.threads, c.batch, c.heads, c.kv_heads, c.queries, c.keys, c.d,
      c.dv, static_cast<int>(c.lengths), c.gap, c.by_position, c.cut, c.page, c.window);
  std::printf(
      "rope %d sinks %d scaled_sinks %d float_products %d rounded_rotation %d batch_invariant %d workspace "
      "%d accumulate %d\n",
      c.rope, c.sinks, c.scaled_sinks, c.float_products, c.rounded_rotation, c.batch_invariant, c.workspace,
      c.accumulate);
}

// The results of a call, or the error in place of them.
struct Results {
  Call call;
  std::string error;
  Results(const Side& side, const std::string& target, const Case& c) {
    side.set_target(target);
    try {
      call = side.prepare(c);
      if (call.run) call.run();
    } catch (const std::exception& e) {
      error = e.what();
    }
  }
};

// Returns whether two elements are quiet NaN that differ in the sign alone. A half, or a bfloat16, has two bytes.
bool are_nan_of_other_sign(const unsigned char* p, const unsigned char* q, std::size_t bytes) {
  const std::size_t last = bytes - 1;
  if (bytes < 2 || (p[last] ^ q[last]) != 0x80 || !std::equal(p, p + last, q)) return false;
  const int top = p[last] & 0x7f, next = p[last - 1];
  return (top == 0x7f && next >= 0xc0) || (bytes == 2 && top == 0x7e && next == 0);
}

// Prints the first difference. Returns false if there is none. With special values, the sign of a NaN may differ.
bool differ(const Case& c, const Results& a, const Results& b) {
  if (a.error != b.error)
    return std::printf("older: \"%s\", today: \"%s\"\n", a.error.c_str(), b.error.c_str());
  if (!a.error.empty() || !a.call.run || !b.call.run) return false;
  for (std::size_t i = 0; i < a.call.outputs.size(); ++i) {
    const Output &x = a.call.outputs[i], &y = b.call.outputs[i];
    if (x.bytes != y.bytes) return std::printf("%s: %zu bytes, today %zu\n", x.name, x.bytes, y.bytes);
    const auto *p = static_cast<const unsigned char*>(x.data), *q = static_cast<const unsigned char*>(y.data);
    for (std::size_t at = 0;; at = (at / x.element + 1) * x.element) {
      at = static_cast<std::size_t>(std::mismatch(p + at, p + x.bytes, q + at).first - p);
      if (at == x.bytes) break;
      const std::size_t first = at / x.element * x.element;
      if (c.special > 0 && are_nan_of_other_sign(p + first, q + first, x.element)) continue;
      return std::printf("%s: element %zu of %zu differs, byte %zu: %02x, today %02x\n", x.name,
                         at / x.element, x.bytes / x.element, at, p[at], q[at]);
    }
  }
  return false;
}

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int compare_bits(double seconds, std::uint64_t seed, const std::string& only) {
  std::vector<std::string> kinds, targets;
  for (const auto& target : today.targets())
    if (contains(older.targets(), target)) targets.push_back(target);
  kinds.insert(kinds.end(), std::begin(views), std::end(views));
  kinds.insert(kinds.end(), std::begin(sources), std::end(sources));
  kinds.insert(kinds.end(), std::begin(rows), std::end(rows));
  std::map<std::string, int> compared, refused;
  const auto start = Clock::now();
  for (; seconds_since(start) < seconds; ++seed) {
    for (const std::string& kind : kinds) {
      if (!only.empty() && only != kind) continue;
      const Case c = draw(kind, seed);
      for (const std::string& target : targets) {
        const Results a(older, target, c), b(today, target, c);
        if (differ(c, a, b)) {
          std::printf("after %.1f s: --kind %s --seed %llu on %s: ", seconds_since(start), kind.c_str(),
                      static_cast<unsigned long long>(seed), target.c_str());
          print(c);
          return 1;
        }
        if (!a.error.empty() && refused[kind] == 0)
          std::printf("%s refused: %s\n", kind.c_str(), a.error.c_str());
        ++(a.error.empty() ? compared : refused)[kind];
      }
    }
  }
  for (const std::string& kind : kinds)
    std::printf("%-20s %7d identical, %d refused by both\n", kind.c_str(), compared[kind], refused[kind]);
  std::printf("up to seed %llu; targets:", static_cast<unsigned long long>(seed));
  for (const std::string& target : targets) std::printf(" %s", target.c_str());
  std::printf("\n");
  return 0;
}

struct Family {
  const char* name;
  std::vector<Case> cases;
};

std::vector<Family> families() {
  const auto rows_of = [](const char* kind, int type, index_t queries, index_t keys) {
    return Case{.kind = kind, .type = type, .stored = type, .queries = queries, .keys = keys};
  };
  const auto of = [](const char* kind, int type, index_t batch, index_t heads, index_t queries, index_t keys,
                     index_t d) {
    Case c{.kind = kind,
           .type = type,
           .batch = batch,
           .heads = heads,
           .kv_heads = heads / 2,
           .queries = queries,
           .keys = keys,
           .d = d,
           .dv = d};
    c.window = keys;
    c.queries_of.assign(static_cast<std::size_t>(batch), queries);
    c.keys_of.assign(static_cast<std::size_t>(batch), keys);
    return c;
  };
  Case mixed = of("attention", 0, 4, 8, 256, 256, 64), packed = of("attention", 3, 1, 8, 700, 700, 64),
       cached = of("decode", 3, 4, 8, 1, 4096, 64);
  mixed.lengths = Lengths::padded, packed.lengths = Lengths::packed;
  mixed.queries_of = mixed.keys_of = {256, 17, 100, 203};
  packed.queries_of = packed.keys_of = {400, 44, 256};
  cached.keys_of = {4096, 100, 1000, 2300};
  return {{"rows",
           {rows_of("softmax", 0, 4096, 64), rows_of("softmax", 0, 64, 4096), rows_of("softmax", 3, 64, 4096),
            rows_of("log_softmax", 0, 64, 4096), rows_of("logsumexp", 1, 64, 4096)}},
          {"rows_backward",
           {rows_of("softmax_backward", 0, 4096, 64), rows_of("softmax_backward", 0, 64, 4096),
            rows_of("log_softmax_backward", 3, 64, 4096)}},
          {"prefill",
           {of("attention", 0, 1, 4, 512, 512, 64), of("attention", 3, 1, 4, 512, 512, 64),
            of("attention", 1, 1, 2, 256, 256, 64)}},
          {"decode",
           {of("decode", 0, 1, 8, 1, 4096, 64), of("decode", 3, 1, 8, 1, 4096, 128),
            of("paged_cache", 3, 2, 8, 1, 4096, 64)}},
          {"backward", {of("backward", 0, 1, 4, 256, 256, 64), of("backward", 3, 1, 4, 256, 256, 64)}},
          {"short",
           {of("attention", 0, 256, 8, 24, 24, 16), of("attention", 0, 128, 8, 4, 64, 32),
            of("backward", 0, 128, 8, 24, 24, 16)}},
          {"lengths", {mixed, packed, cached}}};
}

// Milliseconds of this process's CPU time, which other programs disturb least.
double milliseconds(const Call& call, int calls) {
  const std::clock_t start = std::clock();
  for (int i = 0; i < calls; ++i) call.run();
  return static_cast<double>(std::clock() - start) * 1e3 / CLOCKS_PER_SEC / calls;
}

void compare_times() {
  std::printf("%-14s %-20s %4s %7s %5s %10s %10s %12s\n", "family", "kind", "type", "queries", "keys",
              "older ms", "today ms", "older/today");
  for (const Family& family : families()) {
    double sum = 0;
    for (const Case& c : family.cases) {
      const Call calls[] = {older.prepare(c), today.prepare(c)};
      milliseconds(calls[1], 2);
      const int count = 1 + static_cast<int>(2 / std::max(milliseconds(calls[0], 2), 1e-3));
      std::vector<double> times[2];
      for (int repetition = 0; repetition < 9; ++repetition) {
        double of_side[2] = {};
        for (int turn = 0; turn < 8; ++turn) {
          for (const int i : {turn % 2, 1 - turn % 2}) of_side[i] += milliseconds(calls[i], count) / 8;
        }
        for (const int i : {0, 1}) times[i].push_back(of_side[i]);
      }
      for (auto& of_side : times) std::nth_element(of_side.begin(), of_side.begin() + 4, of_side.end());
      const double ratio = times[0][4] / times[1][4];
      sum += ratio;
      std::printf("%-14s %-20s %4d %7td %5td %10.4f %10.4f %12.3f\n", family.name, c.kind.c_str(), c.type,
                  c.queries, c.keys, times[0][4], times[1][4], ratio);
    }
    std::printf("%-14s mean %71.3f\n", family.name, sum / static_cast<double>(family.cases.size()));
  }
}

}  // namespace
}  // namespace oracle

int main(int argc, char** argv) {
  double seconds = 60;
  std::uint64_t seed = 1;
  std::string kind;
  for (int i = 1; i < argc; i += 2) {
    const std::string option = argv[i];
    if (option == "--time") return oracle::compare_times(), 0;
    const bool has_value = i + 1 < argc;
    if (option == "--seconds" && has_value)
      seconds = std::stod(argv[i + 1]);
    else if (option == "--seed" && has_value)
      seed = std::stoull(argv[i + 1]);
    else if (option == "--kind" && has_value)
      kind = argv[i + 1];
    else
      return std::fprintf(stderr, "ssmax_oracle [--time] [--seconds 60] [--seed 1] [--kind decode]\n"), 2;
  }
  return oracle::compare_bits(seconds, seed, kind);
}
