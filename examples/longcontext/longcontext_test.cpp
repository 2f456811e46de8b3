// Tests the parts of longcontext: tokens, needles, gradients, exact continuation of training, invalid
// files.
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>
#include <string>

#include "../../tests/catch.hpp"
#include "claims.hpp"
#include "generation.hpp"
#include "page.hpp"

namespace {

using namespace longcontext;
namespace fs = std::filesystem;
using Catch::Matchers::Contains;

// A new folder that the destructor removes.
struct Folder {
  fs::path path;
  Folder() {
    std::random_device random;
    do {
      path = fs::temp_directory_path() / ("longcontext_test_" + std::to_string(random()));
    } while (!fs::create_directory(path));
  }
  ~Folder() { fs::remove_all(path); }
};

void write(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

const Corpus& corpus() {
  static const Corpus read = [] {
    const Folder folder;
    examples::Random random(1);
    const char* words[] = {"the", "quick", "brown", "fox",  "jumps", "over",
                           "a",   "lazy",  "dog",   "1961", "and"};
    for (int file = 0; file < 3; ++file) {
      std::string text;
      for (int i = 0; i < 3000; ++i)
        text += std::string(words[random.below(11)]) + (random.below(9) == 0 ? ".\n" : " ");
      write(folder.path / (std::to_string(file) + ".txt"), text);
    }
    return read_corpus(folder.path, 300);
  }();
  return read;
}

Shape small_shape() {
  return {.layers = 2, .heads = 2, .head_width = 8, .hidden = 24, .vocabulary = 300, .theta = 100};
}
Training small_training() {
  return {.length = 140, .sequences = 5, .steps = 12, .needle_part = 0.4, .rate = 1e-2};
}

constexpr Form kForms[] = {Form::softmax, Form::ssmax, Form::log_n, Form::ssmax_bias, Form::size_table};

}  // namespace

TEST_CASE("a tokenizer gives back every text", "[longcontext]") {
  const Tokenizer& tokenizer = corpus().tokenizer;
  CHECK(tokenizer.size() <= 300);
  CHECK(tokenizer.size() > 256);
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  for (const std::string& text : {std::string(), all, std::string("The fox, 42 dogs.  Zürich\n\n x 7")}) {
    CHECK(tokenizer.decode(tokenizer.encode(text)) == text);
  }
  // A common word is one token with its space; digits are never joined.
  CHECK(tokenizer.encode(" brown").size() == 1);
  CHECK(tokenizer.encode(" 1961").size() == 5);
  CHECK(Tokenizer::learn("aaaa aaaa", 256).encode("aaaa").size() == 4);
}

TEST_CASE("a tokenizer joins the most frequent pair first", "[longcontext]") {
  const Tokenizer tokenizer = Tokenizer::learn("ab abc abc bc", 258);
  REQUIRE(tokenizer.merges().size() == 2);
  CHECK(tokenizer.spelling(256) == "ab");  // occurs 3 times, as does bc; ab has the smaller tokens
  CHECK(tokenizer.spelling(257) == " ab");
  CHECK_THROWS_WITH(Tokenizer({{1, 256}}), Contains("joins tokens that it does not have"));
}

TEST_CASE("a corpus says what is wrong with a folder", "[longcontext]") {
  const Folder folder;
  CHECK_THROWS_WITH(read_corpus(folder.path / "none", 300), Contains("does not exist"));
  CHECK_THROWS_WITH(read_corpus(folder.path, 300), Contains("holds no readable text"));
  write(folder.path / "short.txt", "too short");
  const Corpus read = read_corpus(folder.path, 256);
  examples::Random random(1);
  CHECK_THROWS_WITH(draw_text(read.train, 100, random), Contains("of the 100 that one sequence takes"));
}

TEST_CASE("a needle stands where it is said to stand", "[longcontext]") {
  examples::Random random(3);
  const Tokenizer& tokenizer = corpus().tokenizer;
  for (const double depth : {0.0, 0.3, 1.0}) {
    const NeedleDocument document =
        hide_needle(Needle(tokenizer, "Tokyo", "8106422"), corpus().test, 150, depth, random);
    REQUIRE(document.tokens.size() == 150);
    const auto text = [&](index_t first, index_t count) {
      return tokenizer.decode({document.tokens.begin() + first, document.tokens.begin() + first + count});
    };
    CHECK(text(document.needle, document.needle_size) == " The special magic Tokyo number is: 8106422.");
    CHECK(text(document.answer, kDigits) == "8106422");
    CHECK(document.answer + kDigits == 150);
    CHECK_THAT(text(0, document.answer),
               Catch::Matchers::EndsWith(
                   "\nWhat is the special magic Tokyo number?\nThe special magic Tokyo number is: "));
    if (depth == 0) CHECK(document.needle == 0);
  }
  CHECK_THROWS_WITH(hide_needle(Needle(tokenizer, "Tokyo", "8106422"), corpus().test, 20, 0.5, random),
                    Contains("more than the context's 20"));
  for (const double depth : {-0.1, 1.1, std::nan("")}) {
    CHECK_THROWS_WITH(hide_needle(Needle(tokenizer, "Tokyo", "8106422"), corpus().test, 150, depth, random),
                      Contains("depth must lie between 0 and 1"));
  }
}

TEST_CASE("a needle's answer is learnt, a text whole", "[longcontext]") {
  examples::Random random(4);
  const Training training = small_training();
  const Sample needle = draw_sample(corpus(), training, true, random);
  REQUIRE(needle.targets.size() == 140);
  CHECK(std::ranges::count(needle.targets, kIgnored) == 140 - kDigits);
  for (std::size_t i = 0; i + 1 < 140; ++i) {
    if (needle.targets[i] != kIgnored) CHECK(needle.targets[i] == needle.tokens[i + 1]);
  }
  const Sample text = draw_sample(corpus(), training, false, random);
  REQUIRE(text.tokens.size() == 140);
  CHECK(std::ranges::equal(std::span(text.tokens).subspan(1), std::span(text.targets).first(139)));
}

TEST_CASE("a configuration is its multiplier", "[longcontext]") {
  const std::vector<float> s{0.5f, 2.0f}, b{0.25f, -1.0f}, p{1, 3, 5, 7};
  const ScalingParameters<const float> learnt{s, b, p};
  const ssmax::Row row{.head = 1, .position = 3, .n = 4};
  const double expected[] = {1, 2 * std::log(4.0), std::log(4.0), 2 * std::log(4.0) - 1, 2 * 7 - 1};
  for (std::size_t i = 0; i < std::size(kForms); ++i) {
    const double value = std::visit([&](const auto& scaling) { return static_cast<double>(scaling(row)); },
                                    make_scaling(kForms[i], learnt));
    CHECK(value == Approx(expected[i]));
  }
  CHECK(configuration("f").origin == Origin::switched);
  CHECK_THROWS_WITH(configuration("g"), Contains("no configuration 'g'"));
}

TEST_CASE("blocks of a tensor's columns begin as they are told", "[longcontext]") {
  Layout layout;
  layout.add("before", 3, 1, {{1, 0}});
  const Tensor tensor = layout.add("blocks", 1000, 6, {{0, 1}, {5, 0}, {0, 2}});
  examples::Random random(8);
  const Values all = layout.initial_values(random);
  const auto blocks = tensor.matrix(std::span(all));
  CHECK(blocks.leftCols(2).squaredNorm() / 2000 == Approx(1).epsilon(0.1));
  CHECK((blocks.middleCols(2, 2).array() == 5).all());
  CHECK(blocks.rightCols(2).squaredNorm() / 2000 == Approx(4).epsilon(0.1));
}

// Compares every tensor's gradient along its own direction, where a missing or wrong term has the largest
// effect.
TEST_CASE("a model's gradient is that of its loss", "[longcontext]") {
  const bool tied = GENERATE(true, false);
  const Form form = GENERATE(from_range(std::begin(kForms), std::end(kForms)));
  Shape shape = small_shape();
  shape.tied = tied;
  const Model model(shape, form, 80);
  examples::Random random(5);
  // Larger weights than at the start: there, attention is too uniform to test its gradient.
  Values weights(static_cast<std::size_t>(model.layout().size()));
  for (float& x : weights) x = 0.25f * random.standard();
  Tokens tokens(80), targets(tokens.size());
  for (auto& token : tokens) token = random.below(shape.vocabulary);
  for (auto& token : targets) token = random.below(shape.vocabulary);
  const auto rope = model.rope(80);
  Activations a;
  const auto loss = [&](std::span<const float> at, double dloss) {
    model.forward(at, tokens, rope, a);
    const ssmax::View<float, 2> logits(a.logits.data(), {80, shape.vocabulary});
    return ssmax::cross_entropy<float>(logits, targets, logits, {.dloss = dloss}).loss;
  };
  loss(weights, 1);
  Values gradient(weights.size(), 1.0f);  // the backward overwrites the gradient
  model.backward(weights, tokens, rope, a, gradient);

  for (const auto& entry : model.layout().entries()) {
    const auto direction = entry.tensor.values(std::span<const float>(gradient));
    double square = 0;
    for (const float x : direction) square += static_cast<double>(x) * static_cast<double>(x);
    INFO("form " << static_cast<int>(form) << ", " << entry.name << ", |g| " << std::sqrt(square));
    REQUIRE(square > 0);
    const double step = 4e-3 / std::sqrt(square);
    const auto moved = [&](double by) {
      Values there = weights;
      for (std::size_t i = 0; i < direction.size(); ++i) {
        there[static_cast<std::size_t>(entry.tensor.offset) + i] += static_cast<float>(by) * direction[i];
      }
      return loss(there, 1);
    };
    const auto slope = [&](double h) { return (moved(h) - moved(-h)) / (2 * h); };
    CHECK((4 * slope(step) - slope(2 * step)) / 3 == Approx(square).epsilon(0.01));
  }
}

TEST_CASE("token by token a model says what it says at once", "[longcontext]") {
  const Form form = GENERATE(from_range(std::begin(kForms), std::end(kForms)));
  const Model model(small_shape(), form, 30);
  examples::Random random(7);
  Values weights(static_cast<std::size_t>(model.layout().size()));
  for (float& x : weights) x = 0.25f * random.standard();
  const auto rope = model.rope(30);
  Tokens tokens(30);
  for (auto& token : tokens) token = random.below(model.shape().vocabulary);
  Activations whole, parts;
  model.forward(weights, tokens, rope, whole);
  std::vector<Cache> caches = model.caches(30);
  model.forward(weights, std::span(tokens).first(20), rope, parts, caches);
  CHECK(parts.logits.isApprox(whole.logits.topRows(20), 1e-5f));
  for (index_t i = 20; i < 30; ++i) {
    model.forward(weights, std::span(tokens).subspan(static_cast<std::size_t>(i), 1), rope, parts, caches);
    CHECK(parts.logits.row(0).isApprox(whole.logits.row(i), 1e-4f));
  }

  Tokens said;
  continue_text(model, weights, rope, std::span(tokens).first(25), 5,
                [&](index_t token) { said.push_back(token); });
  REQUIRE(said.size() == 5);
  index_t likeliest = 0;
  whole.logits.row(24).maxCoeff(&likeliest);
  CHECK(said.front() == likeliest);
}

TEST_CASE("attention on keys is what the formula says", "[longcontext]") {
  const Form form = GENERATE(Form::softmax, Form::ssmax_bias);
  const Shape shape = small_shape();
  const Model model(shape, form, 30);
  examples::Random random(6);
  Values weights = model.layout().initial_values(random);
  for (const auto& entry : model.layout().entries()) {
    if (!entry.is_matrix()) continue;
    for (float& x : entry.tensor.values(std::span(weights))) x *= 8;
  }
  const auto rope = model.rope(30);
  Tokens tokens(30);
  for (auto& token : tokens) token = random.below(shape.vocabulary);
  Activations a;
  model.forward(weights, tokens, rope, a);
  const auto all = model.attention_on(weights, rope, a, 5, 4, 20, 3);
  REQUIRE(all.size() == 4);

  const auto rotated = [&](const Matrix& qkv, index_t token, index_t column) {
    std::vector<double> x(8);
    for (index_t i = 0; i < 4; ++i) {
      const double angle =
          static_cast<double>(token) * std::pow(shape.theta, -2.0 * static_cast<double>(i) / 8);
      const auto first = static_cast<double>(qkv(token, column + i)),
                 second = static_cast<double>(qkv(token, column + i + 4));
      x[static_cast<std::size_t>(i)] = first * std::cos(angle) - second * std::sin(angle);
      x[static_cast<std::size_t>(i + 4)] = first * std::sin(angle) + second * std::cos(angle);
    }
    return x;
  };
  for (index_t layer = 0; layer < 2; ++layer) {
    for (index_t head = 0; head < 2; ++head) {
      double mean = 0;
      for (index_t query = 20; query < 23; ++query) {
        const auto n = static_cast<double>(query + 1);
        const double c = form == Form::softmax ? 1 : std::log(n);  // s = 1, b = 0
        const Matrix& qkv = a.layers[static_cast<std::size_t>(layer)].qkv;
        const auto q = rotated(qkv, query, head * 8);
        double sum = 0, part = 0;
        for (index_t key = 0; key <= query; ++key) {
          const auto k = rotated(qkv, key, 16 + head * 8);
          const double weight =
              std::exp(c * std::inner_product(q.begin(), q.end(), k.begin(), 0.0) / std::sqrt(8.0));
          sum += weight;
          if (key >= 5 && key < 9) part += weight;
        }
        mean += part / sum / 3;
      }
      CHECK(static_cast<double>(all[static_cast<std::size_t>(2 * layer + head)]) ==
            Approx(mean).epsilon(1e-4));
    }
  }
}

TEST_CASE("training gives the same weights on any number of threads", "[longcontext]") {
  const Model model(small_shape(), Form::ssmax, 140);
  Values expected;
  for (const index_t threads : {1, 2, 3}) {
    ssmax::ThreadPool pool(threads);
    Checkpoint state = start(configuration("b"), model, corpus(), small_training());
    Trainer trainer(model, corpus(), pool);
    for (int i = 0; i < 4; ++i) trainer.step(state);
    if (expected.empty()) expected = state.weights;
    CHECK(std::ranges::equal(state.weights, expected));
  }
}

TEST_CASE("training that was stopped ends where it would have ended", "[longcontext]") {
  const Folder folder;
  const fs::path path = folder.path / "there" / "run.checkpoint";
  const Model model(small_shape(), Form::ssmax_bias, 140);
  ssmax::ThreadPool pool(2);
  Training training = small_training();
  training.steps = 120;  // two or three steps per point of the curve
  const Checkpoint begin = start(configuration("d"), model, corpus(), training);
  const Checkpoint whole =
      train(folder.path / "whole.checkpoint", "whole", begin, training.steps, model, corpus(), pool);
  const Checkpoint stopped = train(path, "stopped", begin, 60, model, corpus(), pool);
  CHECK(stopped.step == 60);
  CHECK(load(path).step == 60);
  const Checkpoint resumed = train(path, "resumed", begin, training.steps, model, corpus(), pool);
  CHECK(std::ranges::equal(resumed.weights, whole.weights));
  CHECK(std::ranges::equal(resumed.averages.mean, whole.averages.mean));
  CHECK(std::ranges::equal(resumed.averages.square, whole.averages.square));
  REQUIRE(whole.curve.size() == kCurvePoints);
  CHECK(std::ranges::equal(resumed.curve, whole.curve, {}, &CurvePoint::text, &CurvePoint::text));
  CHECK(std::ranges::equal(resumed.curve, whole.curve, {}, &CurvePoint::answer, &CurvePoint::answer));
  CHECK(last_mean(whole.curve, &CurvePoint::text) < whole.curve.front().text);

  Training other = training;
  other.rate *= 2;
  CHECK_THROWS_WITH(
      train(path, "other", start(configuration("d"), model, corpus(), other), 120, model, corpus(), pool),
      Contains("was trained with other settings"));
  other.rate = 1e30;
  CHECK_THROWS_WITH(train(folder.path / "diverged.checkpoint", "(d)",
                          start(configuration("d"), model, corpus(), other), 120, model, corpus(), pool),
                    Contains("(d) diverged before step"));
}

TEST_CASE("a study that was stopped ends with the same page", "[longcontext]") {
  const Folder folder;
  Plan plan;
  plan.shape = small_shape();
  plan.training = small_training();
  plan.extension_steps = 12;
  plan.training.steps = 50;
  plan.budget = "1s";
  plan.rates = {1e-2, 1e30};
  plan.sweep_steps = 10;
  plan.seeds = {1, 2};
  plan.extent = {
      .contexts = {1, 2, 8}, .depths = 2, .trials = 1, .windows = 2, .scored = 2, .scored_context = 2};
  check(plan);
  check_text(corpus(), plan.training.length, plan.extent);
  ssmax::ThreadPool pool(2);
  const auto page_of = [&](const char* name) {
    return page(Study(folder.path / name, plan, corpus(), pool).run(), corpus(), "`words`");
  };
  const std::string whole = page_of("whole");
  CHECK_THAT(whole, Contains("| diverged |") && !Contains("{") && !Contains("nan"));
  // All rows of a table have the same number of cells.
  std::istringstream lines(whole);
  for (std::string line, before; std::getline(lines, line); before = line) {
    if (!line.starts_with("|") || !before.starts_with("|")) continue;
    INFO(line);
    CHECK(std::ranges::count(line, '|') == std::ranges::count(before, '|'));
  }

  fs::copy(folder.path / "whole", folder.path / "stopped");
  for (const char* lost : {"f_seed1.checkpoint", "f_seed1.json", "b_seed2.checkpoint", "b_seed2.json",
                           "a_seed2.checkpoint", "a_seed2.json", "rate_c_1.checkpoint", "e_seed1.json",
                           "e_seed1_extended.checkpoint", "c_seed1.json", "c_seed1_extended.checkpoint"}) {
    CHECK(fs::remove(folder.path / "stopped" / lost));
  }
  CHECK(page_of("stopped") == whole);

  const Results results = Study(folder.path / "whole", plan, corpus(), pool).run();
  const auto& f = results.of("f").front()->curve;
  const auto& a = results.of("a").front()->curve;
  REQUIRE(f.size() == a.size());
  CHECK(f[34].text == a[34].text);  // the first 70 % are (a)'s
  CHECK(f[40].text != a[40].text);
  plan.switch_part = 0.5;
  CHECK_THROWS_WITH(page_of("whole"), Contains("is of another plan or text"));
}

TEST_CASE("a checkpoint that is not whole is refused", "[longcontext]") {
  const Folder folder;
  const fs::path path = folder.path / "run.checkpoint";
  const Model model(small_shape(), Form::ssmax, 140);
  const Checkpoint state = start(configuration("b"), model, corpus(), small_training());
  save(path, state);
  CHECK_FALSE(fs::exists(path.string() + ".unfinished"));
  const Checkpoint loaded = load(path);
  CHECK(std::ranges::equal(loaded.weights, state.weights));
  CHECK(loaded.training == state.training);
  CHECK(loaded.shape == state.shape);
  CHECK(loaded.text == corpus().identity);

  const std::string whole = examples::read_file(path);
  for (const std::size_t size :
       {std::size_t{8}, std::size_t{20}, std::size_t{40}, whole.size() / 2, whole.size() - 1}) {
    write(path, whole.substr(0, size));
    CHECK_THROWS_WITH(load(path), Contains("is truncated"));
  }
  for (const std::size_t at :
       {std::size_t{16}, std::size_t{24}, std::size_t{40}, whole.size() / 2, whole.size() - 1}) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    write(path, damaged);
    CHECK_THROWS_WITH(load(path), Contains("run.checkpoint is damaged"));
  }
  write(path, whole + "more");
  CHECK_THROWS_WITH(load(path), Contains("is damaged"));
  write(path, "a picture, or whatever");
  CHECK_THROWS_WITH(load(path), Contains("is not a checkpoint of longcontext"));
  CHECK_THROWS_WITH(load(folder.path / "none"), Contains("does not exist"));
}

TEST_CASE("a model that was trained with Softmax goes on with SSMax", "[longcontext]") {
  const Model softmax(small_shape(), Form::softmax, 140), model(small_shape(), Form::ssmax, 140);
  Checkpoint from = start(configuration("a"), softmax, corpus(), small_training());
  ssmax::ThreadPool pool(1);
  Trainer(softmax, corpus(), pool).step(from);
  const Checkpoint to = with_scaling(from, softmax, configuration("e"), model);
  double mean = 0;
  for (index_t n = 1; n <= 140; ++n) {
    mean += static_cast<double>(model.scaling_parameters(to.weights, 1).s[1]) *
            std::log(static_cast<double>(n)) / 140;
  }
  CHECK(mean == Approx(1));
  CHECK(to.step == 1);
  for (const auto& entry : softmax.layout().entries()) {
    const auto& same = *std::ranges::find(model.layout().entries(), entry.name, &Layout::Entry::name);
    CHECK(std::ranges::equal(entry.tensor.values(std::span(from.weights)),
                             same.tensor.values(std::span(to.weights))));
    CHECK(std::ranges::equal(entry.tensor.values(std::span(from.averages.square)),
                             same.tensor.values(std::span(to.averages.square))));
  }
}

TEST_CASE("an extension begins with the weights and is new in all else", "[longcontext]") {
  const Model model(small_shape(), Form::ssmax, 140);
  Checkpoint from = start(configuration("b"), model, corpus(), small_training());
  ssmax::ThreadPool pool(1);
  Trainer(model, corpus(), pool).step(from);
  from.curve.push_back({1, 2, 3});
  Training extension = small_training();
  extension.rate = 1e-4;
  const Checkpoint to = start_extension(from, extension, 50);
  CHECK(to.weights == from.weights);
  CHECK(to.shape.theta == 50 * from.shape.theta);
  extension.seed = from.training.seed + 1000;  // other samples
  CHECK(to.training == extension);
  CHECK((to.configuration == "b" && to.step == 0 && to.curve.empty()));
  CHECK(to.averages.mean == Values(from.weights.size()));
  CHECK(to.averages.square == Values(from.weights.size()));
  extension.rate = 0;
  CHECK_THROWS_WITH(start_extension(from, extension, 50), Contains("rate must be positive"));
}

// Compares to a calculation by hand: two steps of one weight, with a rate of 0.1.
TEST_CASE("AdamW does what its formula says", "[longcontext]") {
  Eigen::ArrayXf weights(2), gradient(2), mean = Eigen::ArrayXf::Zero(2), square = mean;
  weights << 1, -2;
  gradient << 0.5f, -3;
  const examples::AdamW adam{.rate = 0.1, .decay = 0.2, .mean = 0.9, .square = 0.95};
  examples::update(weights, gradient, mean, square, adam, 1);
  // The first step has the size of the rate, for every size of the gradient.
  CHECK(weights[0] == Approx(1 * 0.98 - 0.1));
  CHECK(weights[1] == Approx(-2 * 0.98 + 0.1));
  gradient << -1, 0;
  examples::update(weights, gradient, mean, square, adam, 2);
  const double m = (0.9 * 0.1 * 0.5 + 0.1 * -1) / (1 - 0.81),
               v = (0.95 * 0.05 * 0.25 + 0.05 * 1) / (1 - 0.9025);
  CHECK(weights[0] == Approx((0.98 - 0.1) * 0.98 - 0.1 * m / std::sqrt(v)));
}

TEST_CASE("an update clips the gradient and decays matrices only", "[longcontext]") {
  Shape shape = small_shape();
  shape.heads = 4;
  REQUIRE(shape.vocabulary * shape.width() > kPiece);  // the embedding is split
  const Model model(shape, Form::size_table, 140);
  Checkpoint state = start(configuration("table"), model, corpus(), small_training());
  const Values before = state.weights;
  Values gradient(before.size(), 0.25f), same = gradient;
  ssmax::ThreadPool pool(2);
  const std::span<float> pieces[] = {gradient, same};
  const double norm = add_up(pieces, pool);
  CHECK(gradient[7] == 0.5f);
  CHECK(norm == Approx(0.5 * std::sqrt(static_cast<double>(before.size()))));
  state.training.decay = 0.5;
  state.training.clip = norm / 4;
  update(model.layout(), state.weights, gradient, norm, state.averages, state.training, 6, pool);
  for (const auto& entry : model.layout().entries()) {
    const bool is_learnt_by_scaling =
        entry.name == "p" || entry.name.ends_with(" s") || entry.name.ends_with(" b");
    CHECK(entry.is_matrix() == !is_learnt_by_scaling);
    const double moved = 1e-2 * (0.1 / (1 - std::pow(0.9, 6))) / std::sqrt(0.05 / (1 - std::pow(0.95, 6)));
    for (index_t i = 0; i < entry.tensor.size(); ++i) {
      const auto at = static_cast<std::size_t>(entry.tensor.offset + i);
      CHECK(state.averages.mean[at] == Approx(0.1 * 0.5 / 4));
      const double decayed = static_cast<double>(before[at]) * (entry.is_matrix() ? 1 - 0.5 * 1e-2 : 1);
      const double roundings = 3e-7;  // of weights below 1
      CHECK(std::abs(static_cast<double>(state.weights[at]) - (decayed - moved)) < roundings);
    }
  }
}

TEST_CASE("a budget is a time", "[longcontext]") {
  CHECK(parse_budget("90s") == 90);
  CHECK(parse_budget("10m") == 600);
  CHECK(parse_budget("1.5h") == 5400);
  for (const char* wrong : {"", "10", "m", "-5m", "0s", "10 m", "10mm", "nanh", "2d"}) {
    CHECK_THROWS_WITH(parse_budget(wrong), Contains("is not a time"));
  }
}

TEST_CASE("sizes and settings that cannot be are refused", "[longcontext]") {
  Shape shape = small_shape();
  shape.head_width = 7;
  CHECK_THROWS_WITH(Model(shape, Form::softmax, 140), Contains("head_width must be even"));
  shape = small_shape(), shape.vocabulary = 100;
  CHECK_THROWS_WITH(Model(shape, Form::softmax, 140), Contains("vocabulary"));
  Training training = small_training();
  training.needle_part = 1.5;
  CHECK_THROWS_WITH(check(training), Contains("needle_part must lie between"));
  training.needle_part = 0.3;  // of five sequences
  CHECK_THROWS_WITH(check(training), Contains("must be a whole number of them"));

  Plan plan;
  plan.sweep_steps = plan.extension_steps = 1;
  CHECK_NOTHROW(check(plan));
  const auto refused = [&](const auto& spoil, const char* why) {
    Plan spoilt = plan;
    spoil(spoilt);
    CHECK_THROWS_WITH(check(spoilt), Contains(why));
  };
  refused([](Plan& p) { p.rates.clear(); }, "needs rates and seeds");
  refused([](Plan& p) { p.rates = {1e-3, -1e-3}; }, "rates must be positive");
  refused([](Plan& p) { p.seeds = {1, 2, 1}; }, "every seed must be another");
  refused([](Plan& p) { p.sweep_steps = kMostSteps + 1; },
          "sweep_steps and extension_steps must lie between 1");
  refused([](Plan& p) { p.training.steps = kMostSteps + 1; }, "steps must lie between");
  refused([](Plan& p) { p.switch_part = 0.01; }, "switch_part must lie between 0.02");
  refused([](Plan& p) { p.theta_factor = 0; }, "theta must lie above 1");
  refused([](Plan& p) { p.extent.contexts = {1, 8, 4}; }, "must begin with 1, rise");
  refused([](Plan& p) { p.extent.contexts = {1, 8, 8}; }, "must begin with 1, rise");
  refused([](Plan& p) { p.extent.contexts = {1, 2}; }, "end above 4");
  refused([](Plan& p) { p.extent.scored_context = 17; }, "must not be above all contexts");
  refused([](Plan& p) { p.extent.depths = 1; }, "depths must be at least 2");
}

TEST_CASE("(f) branches off where a point of the curve ends", "[longcontext]") {
  Plan plan;
  for (const index_t steps : {50, 51, 99, 1009}) {
    plan.training.steps = steps;
    const index_t step = plan.switch_step();
    CHECK(points_until(step, steps) == 35);
    CHECK(points_until(step - 1, steps) == 34);
  }
}

TEST_CASE("claims are judged over all seeds", "[longcontext]") {
  CHECK(Measured({0.1, 0.11, 0.12}).verdict() == std::string("holds"));
  CHECK(Measured({0.1, 0.11}).least_errors() == 6.31);
  CHECK(Measured({0.1, 0.11, 0.12}).least_errors() == 2.92);
  CHECK(Measured({1.0}).verdict() == std::string("too small to tell"));
  CHECK(Measured({-0.1, -0.11, -0.12}).verdict() == std::string("does not hold"));
  CHECK(Measured({0.1, 0.11, -0.01}).verdict() == std::string("too small to tell"));
  CHECK(Measured({0.01, 0.5, 0.02}).verdict() ==
        std::string("too small to tell"));  // the standard error is 0.16
  CHECK(Measured({0.0, 0.0, 0.0}).verdict() == std::string("too small to tell"));
  CHECK(Measured({1, 2, 3}).error == Approx(1 / std::sqrt(3.0)));
}

TEST_CASE("losses are those of windows that lie side by side", "[longcontext]") {
  const Model model(small_shape(), Form::ssmax, 50);
  examples::Random random(8);
  Values weights(static_cast<std::size_t>(model.layout().size()));
  for (float& x : weights) x = 0.25f * random.standard();
  const Extent extent{.contexts = {1, 2}, .windows = 3};
  ssmax::ThreadPool pool(2);
  for (const double factor : {1.0, 50.0}) {
    const auto found = Evaluator(model, weights, factor, corpus(), 50, extent, 1, pool).position_loss();
    REQUIRE(found.size() == 100);
    const auto rope = model.rope(100, factor);
    std::vector<double> expected(100);
    for (std::size_t window = 0; window < 3; ++window) {
      const auto text = std::span(corpus().test).subspan(100 * window, 101);
      Activations a;
      model.forward(weights, text.first(100), rope, a);
      for (std::size_t i = 0; i < 100; ++i) {
        const auto row = a.logits.row(static_cast<index_t>(i)).cast<double>().array();
        expected[i] += (std::log(row.exp().sum()) - row[text[i + 1]]) / 3;
      }
    }
    for (std::size_t i = 0; i < 100; ++i) CHECK(found[i] == Approx(expected[i]).epsilon(1e-4));
  }
}

// Gives every configuration its own numbers, so that an exchange of two configurations is an error.
TEST_CASE("a claim compares what it says", "[longcontext]") {
  Results results;
  results.plan.seeds = {1, 2, 3};
  const index_t trained = results.plan.training.length, longest = results.plan.extent.longest(trained);
  const auto add = [&](const char* name, double near, double far, index_t found, double score) {
    for (const std::uint64_t seed : results.plan.seeds) {
      const double shift = 1e-3 * static_cast<double>(seed);
      Run run{.configuration = name, .seed = seed, .curve = {{1, near + shift, 0}}, .evaluation = {}};
      run.evaluation.position_loss.assign(static_cast<std::size_t>(longest), far + shift);
      std::fill_n(run.evaluation.position_loss.begin(), trained, near + shift);
      run.evaluation.needles = {
          {trained, 0.5, 100, 100}, {2 * trained, 0.5, 100, found}, {longest, 0.5, 100, found}};
      run.evaluation.needles_before = {{trained, 0.5, 100, 100}, {2 * trained, 0.5, 100, 0}};
      run.evaluation.head_scores = {0.1, score + shift};
      run.evaluation.scored = {{score, found > 50 ? kDigits : 3}, {score, 0}};
      results.runs.push_back(run);
    }
  };
  // Results as in the paper.
  add("a", 3.20, 5.0, 10, 0.10), add("b", 3.10, 3.2, 90, 0.90), add("c", 3.12, 3.3, 70, 0.70);
  add("d", 3.05, 4.5, 60, 0.60), add("e", 3.40, 4.0, 40, 0.40), add("f", 3.15, 3.4, 50, 0.50);
  const auto all = claims(results);
  CHECK(all.size() == 39);
  for (const Claim& claim : all) {
    INFO(claim.text << ", " << claim.measure << ": " << claim.measured.mean);
    CHECK(claim.measured.verdict() == std::string("holds"));
  }
  CHECK(all[0].measured.mean == Approx(0.1));  // (a) − (b)
  CHECK(all[6].measured.mean == Approx(1.8));  // far beyond the trained length
  // (c) finds fewer than half of the needles in one seed.
  Results unlearnt = results;
  for (Run& run : unlearnt.runs) {
    if (run.configuration == "c" && run.seed == 2) run.evaluation.needles.front().right = 49;
  }
  for (const Claim& claim : claims(unlearnt)) {
    const bool of_c = claim.measure.find("(c)") != std::string::npos && claim.figure >= 6;
    CHECK(claim.verdict() == std::string(of_c ? "not applicable" : "holds"));
  }
  // All results opposite to the paper.
  for (Run& run : results.runs) {
    if (run.configuration == "a") {
      run.configuration = "b";
    } else if (run.configuration == "b") {
      run.configuration = "a";
    }
  }
  const auto other = claims(results);
  for (const std::size_t i : std::vector<std::size_t>{0, 1, 6, 7, 13})
    CHECK(other[i].measured.verdict() == std::string("does not hold"));
}

TEST_CASE("a logarithm is found again", "[longcontext]") {
  std::vector<double> p;
  for (int n = 1; n <= 100; ++n) p.push_back(0.7 * std::log(n) - 2);
  p.front() = 99;  // n = 1 is not part of the fit
  const Fit exact = fit_to_logarithm(p);
  CHECK(exact.slope == Approx(0.7));
  CHECK(exact.intercept == Approx(-2));
  CHECK(exact.r2 == Approx(1));
  for (std::size_t i = 0; i < p.size(); i += 2) p[i] += 1;
  CHECK(fit_to_logarithm(p).r2 < 0.9);
}
