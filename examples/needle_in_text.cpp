// Measures the attention on a needle in a text. One sentence, the needle, stands among the words of a real
// text, and one query is similar to it. The table gives the attention on the needle's tokens as the context
// grows. With Softmax this attention falls; with SSMax it stays high.
//
// The program trains no model. Keys and the query are means of random word vectors, weighted by idf
// (embedding.hpp). So every number depends only on the text, the words of the question and the scaling of
// the call. Keys have no position, so every depth is equally easy and only n changes.
//
// All three scalings multiply the logits by exactly 1 at n = 128 (the default s is 1 / ln 128). So the
// first row is the same for all scalings, and the other rows compare how the scalings depend on n. SSMax
// keeps its attention on the needle only if the needle's logit exceeds the other logits by 1/s, as in the
// paper. With --gain 6 the difference is smaller, and SSMax also loses the needle, at larger n.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <ssmax/ssmax.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "embedding.hpp"
#include "plot.hpp"
#include "progress.hpp"
#include "text.hpp"

namespace {

using examples::Token;
using ssmax::index_t;

constexpr std::size_t kSmallest = 128;  // tokens of the smallest context
constexpr std::size_t kWindow = 8;      // tokens of the sentence in a key's vector

struct Options {
  std::string path = "/usr/share/common-licenses";
  std::string needle = "The special magic Tokyo number is: 8106422.";
  std::string question = "What is the special magic Tokyo number?";
  double depth = 0.5;
  double s = 1 / std::log(static_cast<double>(kSmallest));
  double bias = 0.5;
  double gain = 10;
  std::size_t width = 64;
  std::size_t tokens = 2'000'000;  // keys take half a GB at the default width
  std::uint64_t seed = 1;
  std::string plot;
  bool check = false;

  // Returns the s that gives, with the bias, the multiplier of SSMax at n = 128.
  double s_beside_bias() const { return s - bias / std::log(static_cast<double>(kSmallest)); }
};

void add_options(CLI::App& app, Options& options) {
  app.add_option("path", options.path, "A text file, or a folder of text files")->capture_default_str();
  app.add_option("--needle", options.needle, "The hidden sentence")->capture_default_str();
  app.add_option("--question", options.question, "What the query asks")->capture_default_str();
  app.add_option("--depth", options.depth, "Where the needle lies: 0 is the start, 1 the end of the context")
      ->capture_default_str();
  app.add_option("--s", options.s, "s of SSMax; the default is 1 / ln 128")->capture_default_str();
  app.add_option("--bias", options.bias,
                 "b of SSMax with bias; its s is chosen so that both agree at n = 128")
      ->capture_default_str();
  app.add_option("--gain", options.gain, "A logit is this times the cosine of query and key")
      ->capture_default_str();
  app.add_option("--width", options.width, "Channels of a word's vector")->capture_default_str();
  app.add_option("--tokens", options.tokens, "Use at most so many tokens of the text")->capture_default_str();
  app.add_option("--seed", options.seed, "Of the words' vectors")->capture_default_str();
  app.add_option("--plot", options.plot, "Write needle_in_text.gp and needle_in_text.png to this folder");
  app.add_flag("--check", options.check, "Fail unless Softmax fades and SSMax holds");
}

void validate(const Options& options) {
  // The conditions state the valid range, so NaN fails too.
  if (!(options.depth >= 0 && options.depth <= 1))
    throw std::invalid_argument("--depth must lie between 0 and 1");
  if (!(options.gain > 0 && options.gain <= 1000))
    throw std::invalid_argument("--gain must lie between 0 and 1000");
  if (!(std::isfinite(options.s) && std::isfinite(options.bias))) {
    throw std::invalid_argument("--s and --bias must be finite");
  }
  if (options.width < 1 || options.width > 65'536)
    throw std::invalid_argument("--width must lie between 1 and 65536");
}

// The data that all context sizes share.
struct Task {
  std::vector<Token> text, needle;
  std::size_t files;
  examples::Embedding embedding;
  std::vector<float> query;
};

std::vector<Token> tokenize_words(const char* option, const std::string& sentence,
                                  examples::Vocabulary& vocabulary) {
  auto tokens = examples::tokenize(sentence, vocabulary);
  for (const Token token : tokens) {
    if (examples::is_word(vocabulary.word(token))) return tokens;
  }
  throw std::invalid_argument(std::string(option) + " has no words");
}

Task prepare(const Options& options) {
  examples::Vocabulary vocabulary;
  auto text = examples::read_text(options.path, options.tokens, vocabulary);
  auto needle = tokenize_words("--needle", options.needle, vocabulary);
  const auto question = tokenize_words("--question", options.question, vocabulary);
  if (text.tokens.size() < kSmallest) {
    throw std::runtime_error(options.path + " has only " + std::to_string(text.tokens.size()) +
                             " tokens; the smallest context takes " + std::to_string(kSmallest));
  }
  if (needle.size() >= kSmallest) {
    throw std::invalid_argument("--needle has " + std::to_string(needle.size()) +
                                " tokens and must leave room for text among " + std::to_string(kSmallest));
  }
  examples::Embedding embedding(vocabulary, text.tokens, options.width, options.seed);
  std::vector<float> query(options.width);
  embedding.passage(question, query);
  return {std::move(text.tokens), std::move(needle), text.files, std::move(embedding), std::move(query)};
}

// Returns the context sizes: powers of two times the smallest size, then the whole text with the needle.
std::vector<std::size_t> context_sizes(const Task& task) {
  const std::size_t all = task.text.size() + task.needle.size();
  std::vector<std::size_t> sizes;
  for (std::size_t n = kSmallest; n < all; n *= 2) sizes.push_back(n);
  sizes.push_back(all);
  return sizes;
}

// A context of n tokens: the needle, and the begin of the text.
struct Context {
  std::size_t n, needle_at;
  std::vector<float> keys;    // [n, width]
  std::vector<float> values;  // [n, 2]: 1 for a token of the needle, 1 for every token
};

Context hide_needle(const Task& task, const Options& options, std::size_t n) {
  const std::size_t rest = n - task.needle.size();
  const auto at = static_cast<std::size_t>(std::llround(options.depth * static_cast<double>(rest)));
  Context context{n, at, std::vector<float>(n * options.width), std::vector<float>(n * 2)};

  std::size_t written = 0;
  const auto append = [&](std::span<const Token> tokens, float is_needle) {
    // Embed each part separately, so that no sentence continues across an end of the needle.
    task.embedding.tokens_in_context(tokens, kWindow,
                                     std::span(context.keys).subspan(written * options.width));
    for (std::size_t i = written; i < written + tokens.size(); ++i) {
      context.values[2 * i] = is_needle, context.values[2 * i + 1] = 1;
    }
    written += tokens.size();
  };
  const std::span<const Token> text(task.text);
  append(text.first(at), 0);
  append(task.needle, 1);
  append(text.subspan(at, rest - at), 0);
  return context;
}

struct Mass {
  double needle, total;
};

// Computes the attention of one query on n keys. The values are indicators, so out is the sum of the
// probabilities over the needle's tokens and over all tokens. No row of n probabilities is stored.
template <class Scaling>
Mass attend(const Task& task, const Context& context, double gain, const Scaling& scaling) {
  const auto n = static_cast<index_t>(context.n);
  const auto width = static_cast<index_t>(task.query.size());
  float out[2];
  ssmax::attention({.q = {task.query.data(), {1, 1, 1, width}},
                    .k = {context.keys.data(), {1, 1, n, width}},
                    .v = {context.values.data(), {1, 1, n, 2}},
                    .out = {out, {1, 1, 1, 2}},
                    .scale = gain},
                   scaling, ssmax::Causal{});
  return {static_cast<double>(out[0]), static_cast<double>(out[1])};
}

struct Measured {
  std::size_t n, needle_at;
  Mass softmax, ssmax, with_bias;
};

std::vector<Measured> measure(const Task& task, const Options& options) {
  const ssmax::SSMax<float> ssmax{static_cast<float>(options.s)};
  const ssmax::SSMax<float> with_bias{static_cast<float>(options.s_beside_bias()),
                                      static_cast<float>(options.bias)};

  const auto sizes = context_sizes(task);
  double work = 0;
  for (const std::size_t n : sizes) work += static_cast<double>(n);
  examples::Progress progress(work);

  std::vector<Measured> rows;
  for (const std::size_t n : sizes) {
    const Context context = hide_needle(task, options, n);
    progress.advance(0.7 * static_cast<double>(n));  // embedding takes most of the time
    const auto mass = [&](const auto& scaling) {
      const Mass found = attend(task, context, options.gain, scaling);
      progress.advance(0.1 * static_cast<double>(n));
      return found;
    };
    rows.push_back({n, context.needle_at, mass(ssmax::Softmax{}), mass(ssmax), mass(with_bias)});
  }
  return rows;
}

void print_task(const Task& task, const Options& options) {
  std::printf("Text      %s: %zu tokens in %zu file%s%s\n", options.path.c_str(), task.text.size(),
              task.files, task.files == 1 ? "" : "s",
              task.text.size() == options.tokens ? ", cut by --tokens" : "");
  std::printf("Needle    \"%s\" (%zu tokens), at depth %g\n", options.needle.c_str(), task.needle.size(),
              options.depth);
  std::printf("Question  \"%s\"\n", options.question.c_str());
  std::printf("Logits    z = %g cos(question, key), then softmax(c z) over n keys:\n", options.gain);
  std::printf("          Softmax c = 1;  SSMax c = %.4f ln n;  SSMax with bias c = %.4f ln n %c %g\n\n",
              options.s, options.s_beside_bias(), options.bias < 0 ? '-' : '+', std::abs(options.bias));
}

void print_table(const std::vector<Measured>& rows) {
  std::printf("Attention on the needle's tokens\n");
  std::printf("%10s %10s %10s %16s\n", "n", "Softmax", "SSMax", "SSMax with bias");
  for (const auto& row : rows) {
    std::printf("%10zu %8.1f %% %8.1f %% %14.1f %%\n", row.n, 100 * row.softmax.needle,
                100 * row.ssmax.needle, 100 * row.with_bias.needle);
  }
  const auto& [first, last] = std::pair(rows.front(), rows.back());
  std::printf(
      "\nFrom n = %zu to %zu the needle's attention goes from %.1f %% to %.1f %% under Softmax, "
      "to %.1f %% under SSMax.\n",
      first.n, last.n, 100 * first.softmax.needle, 100 * last.softmax.needle, 100 * last.ssmax.needle);
}

examples::Plot figure(const std::vector<Measured>& rows) {
  const auto curve = [&](const char* label, const char* look, Mass Measured::*mass) {
    examples::Curve line{label, std::string("linespoints linewidth 2.5 pointsize 1.5 ") + look, {}, {}};
    for (const auto& row : rows) {
      line.x.push_back(static_cast<double>(row.n)), line.y.push_back((row.*mass).needle);
    }
    return line;
  };
  // Label every doubling if there is space for the labels.
  const std::string tics = rows.size() <= 11 ? "set xtics 128, 2" : "set xtics 128, 4";
  return {.name = "needle_in_text",
          .title = "A needle in a text: attention on its tokens",
          .x_label = "n, the tokens in the context",
          .y_label = "attention on the needle",
          .settings = {"set logscale x 2", tics, "set format x '%.0f'", "set yrange [0:1.05]",
                       "set key bottom left"},
          .curves = {curve("SSMax", "pointtype 5 linecolor rgb '#d62728'", &Measured::ssmax),
                     curve("SSMax with bias", "pointtype 9 linecolor rgb '#ff9f1c'", &Measured::with_bias),
                     curve("Softmax", "pointtype 7 linecolor rgb '#1f5fbf'", &Measured::softmax)}};
}

// Checks the paper's claims as relations between the rows.
int check_relations(const std::vector<Measured>& rows) {
  examples::Check check;
  const auto& first = rows.front();
  check.near("SSMax at the first n", first.ssmax.needle, first.softmax.needle, 1e-4);
  check.near("SSMax with bias at the first n", first.with_bias.needle, first.softmax.needle, 1e-4);
  check.holds("Softmax starts on the needle", first.softmax.needle > 0.5);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::string at = " at n = " + std::to_string(rows[i].n);
    for (const Mass& mass : {rows[i].softmax, rows[i].ssmax, rows[i].with_bias}) {
      // Attention sums its values in float: the error is about 1e-6 for the licences' text and 1e-5 at two
      // million keys.
      check.near("all probabilities" + at, mass.total, 1, 1e-4);
    }
    if (i == 0) continue;
    check.holds("Softmax fades" + at, rows[i].softmax.needle < rows[i - 1].softmax.needle);
    check.holds("SSMax holds" + at, rows[i].ssmax.needle > 0.9 * first.ssmax.needle);
    check.holds("the bias lies between" + at, rows[i].with_bias.needle > rows[i].softmax.needle &&
                                                  rows[i].with_bias.needle < rows[i].ssmax.needle);
  }
  check.holds("Softmax has lost half of the needle at the end",
              rows.back().softmax.needle < 0.5 * first.softmax.needle);
  return check.exit_code();
}

int run(const Options& options) {
  validate(options);
  const Task task = prepare(options);
  print_task(task, options);
  const auto rows = measure(task, options);
  print_table(rows);
  if (!options.plot.empty()) examples::draw(figure(rows), options.plot);
  return options.check ? check_relations(rows) : EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{
      "How much attention lands on one hidden sentence as the context grows, under Softmax and SSMax."};
  add_options(app, options);
  CLI11_PARSE(app, argc, argv);
  try {
    return run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "needle_in_text: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
