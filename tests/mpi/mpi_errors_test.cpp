// Invalid arguments and arguments that differ between ranks throw the same error on every rank without deadlock.

#include <ssmax/mpi.hpp>

#include "../test.hpp"
#include "mpi_call.hpp"

namespace mpi_problem::mpi_call::mpi_errors_test {

TEST_CASE("invalid arguments on one rank throw on all ranks", "[mpi][errors]") {
  Call call;
  if (is_last()) call.arguments.out = {call.share.out.data(), {1, 2, call.share.shape.queries, 3}};
  check_refused_alike(call, call.refused(), {"mpi::attention", "out", "3", "4", "rank"});
  call.arguments.out = {call.share.q.data(), {1, 2, call.share.shape.queries, 4}};
  check_refused_alike(call, call.refused(), {"mpi::attention", "out", "overlaps q"});
}

TEST_CASE("throws for an out that is q over a cache", "[mpi][decode][errors]") {
  const KvCache<double> cache({.width = 4, .capacity = 1});
  const Layout layout = Layout::contiguous(0, world().ranks());
  std::vector<double> q(4, 1.0), out(4, -77.0);
  const auto message = [&](std::vector<double>& to) {
    return refusal([&] {
      ssmax::mpi::attention<double>(world(), layout, 0,
                                    {.q = {q.data(), {1, 1, 1, 4}},
                                     .keys = cache,
                                     .out = {to.data(), {1, 1, 1, 4}},
                                     .more_queries_than_keys = true});
    });
  };
  const std::string in_place = message(q);
  INFO(in_place);
  CHECK(everywhere(mentions(in_place, "mpi::attention") && mentions(in_place, "overlaps q")));
  CHECK(everywhere(q == std::vector<double>(4, 1.0)));
  CHECK(everywhere(message(out) == "(nothing was thrown)"));
}

TEST_CASE("throws for accumulate", "[mpi][errors]") {
  Call call;
  call.accumulate = is_last();
  check_refused_alike(call, call.refused_backward(), {"mpi::attention_backward", "accumulate"});
}

TEST_CASE("throws for members that have no meaning over ranks", "[mpi][errors]") {
  using Arguments = ssmax::AttentionArguments<double>;
  const auto check = [](const char* word, const auto& change) {
    Call call;
    const Arguments valid = call.arguments;
    if (is_last()) change(call.arguments, call);
    check_refused_alike(call, call.refused(), {"mpi::attention", word, "rank"});
    call.arguments = valid;
  };
  check("first_key", [](Arguments& a, Call&) { a.first_key = 1; });
  check("all_keys", [](Arguments& a, Call&) { a.all_keys = 40; });
  check("first_query", [](Arguments& a, Call&) { a.first_query = 1; });
  check("all_queries", [](Arguments& a, Call&) { a.all_queries = 40; });
  check("continues", [](Arguments& a, Call&) { a.continues = true; });
  check("more_queries_than_keys", [](Arguments& a, Call&) { a.more_queries_than_keys = true; });
  check("state", [](Arguments& a, Call& call) { a.state.shift = call.share.of_rows(call.share.lse.data()); });
  const KvCache<double> cache({.width = 4, .capacity = 1});
  check("keys", [&](Arguments& a, Call&) { a.keys = cache; });
  check("q", [](Arguments& a, Call&) { a = {}; });
}

TEST_CASE("throws for parts of the queries or keys in the backward", "[mpi][backward][errors]") {
  const auto check = [](const char* word, const auto& change) {
    Call call;
    auto arguments = call.share.backward();
    if (is_last()) change(arguments);
    const std::string message = refusal([&] {
      ssmax::mpi::attention_backward<double>(world(), call.layout, arguments, call.share.gradients());
    });
    check_refused_alike(call, message, {"mpi::attention_backward", word, "rank"});
  };
  check("first_key", [](auto& a) { a.first_key = 1; });
  check("all_keys", [](auto& a) { a.all_keys = 40; });
  check("first_query", [](auto& a) { a.first_query = 1; });
  check("all_queries", [](auto& a) { a.all_queries = 40; });
}

TEST_CASE("throws for tensors of different storage types", "[mpi][backward][errors]") {
  const Problem<float> problem({1, 2, 1, 40, 40, 4, 4});
  const Layout layout = Layout::contiguous(40, world().ranks(), 1);
  Share<float> share(problem, layout, world().rank());
  Share<ssmax::half> other(Problem<ssmax::half>(problem.shape), layout, world().rank());
  auto arguments = share.forward();
  arguments.out = other.forward().out;
  const std::string forward = refusal([&] { ssmax::mpi::attention(world(), layout, arguments); });
  INFO(forward);
  CHECK(everywhere(mentions(forward, "out") && mentions(forward, "storage")));
  auto gradients = share.gradients();
  gradients.dk = other.gradients().dk;
  const std::string backward =
      refusal([&] { ssmax::mpi::attention_backward(world(), layout, share.backward(), gradients); });
  INFO(backward);
  CHECK(everywhere(mentions(backward, "dk") && mentions(backward, "storage")));
  if (world().ranks() == 1) return;
  const std::string differs =
      refusal([&] { ssmax::mpi::attention(world(), layout, is_last() ? other.forward() : share.forward()); });
  INFO(differs);
  CHECK(everywhere(mentions(differs, "type") && mentions(differs, "differs")));
}

TEST_CASE("throws for a layout with another number of ranks or another length", "[mpi][errors]") {
  Call call;
  call.layout = Layout::contiguous(40, world().ranks() + 1, 1);
  check_refused_alike(call, call.refused(), {"layout", "ranks"});
  call.layout = Layout::contiguous(41 * world().ranks(), world().ranks(), 1);
  check_refused_alike(call, call.refused(), {"positions", "layout"});
}

TEST_CASE("the error names the argument that differs between ranks", "[mpi][errors]") {
  if (world().ranks() == 1) return;
  Call call;
  SECTION("a shape") {
    if (is_last()) {
      call.arguments.q = {call.share.q.data(), {1, 1, call.share.shape.queries, 4}};
      call.arguments.out = {call.share.out.data(), {1, 1, call.share.shape.queries, 4}};
      call.arguments.lse = {call.share.lse.data(), {1, 1, call.share.shape.queries}};
    }
    check_refused_alike(call, call.refused(), {"heads", "1", "2"});
  }
  SECTION("the layout") {
    std::vector<index_t> lengths(static_cast<std::size_t>(world().ranks()));
    for (int r = 0; r < world().ranks(); ++r) lengths[static_cast<std::size_t>(r)] = call.layout.count(r);
    if (is_last()) lengths.front() += 1;
    call.layout = Layout::contiguous(lengths);
    check_refused_alike(call, call.refused(), {"the", "layout"});
  }
  SECTION("whether heads travel") {
    if (is_last()) call.layout = call.layout.by_heads();
    check_refused_alike(call, call.refused(), {"the", "layout"});
  }
  SECTION("whether lse is wanted") {
    if (is_last()) call.arguments.lse = {};
    check_refused_alike(call, call.refused(), {"lse"});
  }
  SECTION("the window") {
    check_refused_alike(call, call.refused(SlidingWindow{is_last() ? 5 : 6}), {"mask"});
  }
  SECTION("the type of the mask") {
    check_refused_alike(call, is_last() ? call.refused(Causal{}) : call.refused(Full{}), {"type"});
  }
  SECTION("the score") {
    check_refused_alike(call, call.refused(Full{}, Softcap{is_last() ? 5.0 : 6.0}), {"score"});
  }
  SECTION("the scale") {
    check_refused_alike(call, call.refused(Full{}, Identity{}, {.scale = is_last() ? 0.5 : 0.25}), {"scale"});
  }
  SECTION("dropout") {
    const Dropout dropout{.p = 0.1, .seed = is_last() ? 5u : 6u};
    check_refused_alike(call, call.refused(Full{}, Identity{}, {.dropout = dropout}), {"dropout"});
  }
  SECTION("scaled_sinks or sinks") {
    check_refused_alike(call, call.refused(Full{}, Identity{}, {.scaled_sinks = is_last()}),
                        {"scaled_sinks"});
  }
  SECTION("float_products") {
    const AttentionOptions<double> options{.float_products = is_last()};
    check_refused_alike(call, call.refused(Full{}, Identity{}, options),
                        {"mpi::attention", "float_products"});
    check_refused_alike(call, call.refused_backward(options), {"mpi::attention_backward", "float_products"});
  }
  SECTION("rounded_rotation") {
    const AttentionOptions<double> options{.rounded_rotation = is_last()};
    check_refused_alike(call, call.refused(Full{}, Identity{}, options),
                        {"mpi::attention", "rounded_rotation"});
  }
  SECTION("the rope") {
    const ssmax::Rope<double> rope({.width = 4, .theta = is_last() ? 10'000.0 : 500'000.0}, 40);
    check_refused_alike(call, call.refused(Full{}, Identity{}, {.rope = &rope}), {"the", "rope"});
    const ssmax::Rope<double> factor({.width = 4, .attention_factor = is_last() ? 1.0 : 2.0}, 40);
    check_refused_alike(call, call.refused(Full{}, Identity{}, {.rope = &factor}), {"the", "rope"});
    const std::array omega{1.0, is_last() ? 0.5 : 0.25};
    const ssmax::Rope<double> frequencies({.width = 4, .frequencies = omega}, 40);
    check_refused_alike(call, call.refused(Full{}, Identity{}, {.rope = &frequencies}), {"the", "rope"});
    const ssmax::Rope<double> longer({.width = 4}, is_last() ? 50 : 40);
    check_refused_alike(call, call.refused(Full{}, Identity{}, {.rope = &longer}), {"the", "rope"});
    const std::array<index_t, 80> positions{};
    const std::array<index_t, 2> axes{0, is_last() ? 0 : 1}, one_axis{};
    const ssmax::Rope<double> of_axes({.width = 4}, View<const index_t, 2>(positions.data(), {2, 40}), axes);
    check_refused_alike(call, call.refused(Full{}, Identity{}, {.rope = &of_axes}), {"the", "rope"});
    Call two{.batch = 2};
    const index_t sequences = is_last() ? 1 : 2;
    const ssmax::Rope<double> of_sequences(
        {.width = 4}, View<const index_t, 3>(positions.data(), {sequences, 1, 40}), one_axis);
    check_refused_alike(two, two.refused(Full{}, Identity{}, {.rope = &of_sequences}), {"the", "rope"});
  }
  SECTION("the contents of a cache") {
    const Layout layout = Layout::contiguous(0, world().ranks());
    const std::array<float, 4> q{};
    std::array<float, 4> out{};
    const auto refused = [&]<class X>(X) {
      const ssmax::KvCache<X> cache({.width = 4, .capacity = 1});
      return refusal([&] {
        ssmax::mpi::attention(
            world(), layout, 0,
            {.q = {q.data(), {1, 1, 0, 4}}, .keys = cache, .out = {out.data(), {1, 1, 0, 4}}});
      });
    };
    const std::string message = is_last() ? refused(ssmax::half{}) : refused(float{});
    INFO(message);
    CHECK(everywhere(mentions(message, "cache")));
  }
  SECTION("whether a length is given") {
    const KvCache<double> cache({.width = 4, .capacity = 1});
    const std::string message =
        is_last() ? refusal([&] { ssmax::mpi::attention<double>(world(), call.layout, 0, {.keys = cache}); })
                  : call.refused();
    CHECK(everywhere(mentions(message, "length") || mentions(message, "rank")));
  }
  SECTION("the function") {
    const std::string message = is_last() ? call.refused() : call.refused_backward();
    CHECK(everywhere(mentions(message, "function")));
  }
}

TEST_CASE("Layout throws for invalid arguments", "[mpi][errors]") {
  check_refused_with_words({"ranks", "0"}, [] { (void)Layout::contiguous(10, 0); });
  check_refused_with_words({"positions", "-1"}, [] { (void)Layout::zigzag(-1, 2); });
  check_refused_with_words({"unit", "0"}, [] { (void)Layout::zigzag(5, 2, 0); });
  const std::array<Segment, 2> gap{{{0, 3, 0}, {4, 5, 1}}}, rank{{{0, 3, 0}, {3, 5, 2}}};
  check_refused_with_words({"segment", "4", "3"}, [&] { (void)Layout(gap, 2); });
  check_refused_with_words({"rank", "2"}, [&] { (void)Layout(rank, 2); });
}

TEST_CASE("Layout distributes whole units evenly", "[mpi]") {
  const Layout a = Layout::contiguous(10, 3, 2);
  CHECK((a.count(0) == 4 && a.count(1) == 4 && a.count(2) == 2));
  const Layout b = Layout::zigzag(8, 2, 1);
  CHECK((b.segments()[3].rank == 0 && b.segments()[3].begin == 6 && b.segments()[1].rank == 1));
  const Layout c = Layout::contiguous(100, 4);
  CHECK((c.count(0) == 100 && c.count(1) == 0 && c.positions() == 100 && c.segments().size() == 1));
}

TEST_CASE("MPI errors become exceptions with the text from MPI", "[mpi][errors]") {
  try {
    ssmax::detail::check_mpi("MPI_Isend", MPI_ERR_COUNT);
    FAIL("nothing was thrown");
  } catch (const std::runtime_error& error) {
    CHECK(std::string(error.what()).find("MPI_Isend") != std::string::npos);
    CHECK(std::string(error.what()).find("count") != std::string::npos);
  }
}

}  // namespace mpi_problem::mpi_call::mpi_errors_test
