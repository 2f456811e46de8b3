// Writes and prints the explanation of a call. Only the drivers include this file.
#pragma once

#include <concepts>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "route.hpp"

SSMAX_BEGIN_DETAIL

/// Returns whether every call is printed. Reads SSMAX_TRACE once per process.
inline bool traces_calls() {
  static const bool traces = [] {
    const char* value = std::getenv("SSMAX_TRACE");
    return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
  }();
  return traces;
}

/// The explanation of one call. `explains` is false in most calls: drivers read it before they collect their sizes.
class Explainer {
 public:
  const bool explains;
  const bool only_explains;

  explicit Explainer(const Caller& caller)
      : explains(caller.explanation != nullptr || traces_calls()),
        only_explains(caller.only_explains),
        caller_(caller) {}

  /// Sets the values that are known before a driver runs. Compute is the type of sums.
  template <class Compute>
  void set(const Route& route, index_t rows) {
    route_ = route;
    rows_ = rows;
    is_double_ = std::same_as<Compute, double>;
  }

  /// Publishes the explanation: the values of `set` and the sizes that a driver computed. Requires `explains`.
  SSMAX_COLD void publish(Explanation e) const {
    const Path path = e.tasks > 0 ? route_.path : Path::none;
    const bool is_bf16 =
        path == Path::prefill_bf16 || path == Path::decode_bf16 || path == Path::backward_bf16;
    e.function = caller_.function;
    e.path = path;
    e.target = target_in_use();
    e.operands = is_bf16 ? "bfloat16" : is_double_ ? "double" : "float";
    e.rows = rows_;
    e.reason = path == Path::none ? "" : route_.reason;
    if (caller_.explanation != nullptr) *caller_.explanation = e;
    if (only_explains || !traces_calls()) return;
    char line[max_of_a_line];
    write_line(e, line);
    std::fprintf(stderr, "%s\n", line);
  }

 private:
  const Caller& caller_;
  Route route_{};
  index_t rows_ = 0;
  bool is_double_ = false;
};

SSMAX_END
