// Workspace: memory that grows, stays, and changes hands.

#include <cstring>

#include "test.hpp"

namespace {

using ssmax::Workspace;

TEST_CASE("a workspace grows to the largest request and keeps its memory", "[workspace]") {
  Workspace workspace;
  CHECK(workspace.size() == 0);
  std::byte* const first = workspace.reserve(100);
  CHECK(reinterpret_cast<std::uintptr_t>(first) % 64 == 0);
  std::memset(first, 1, 100);
  CHECK(workspace.size() == 100);
  CHECK(workspace.reserve(40) == first);
  CHECK(workspace.size() == 100);
  std::memset(workspace.reserve(10'000), 2, 10'000);
  CHECK(workspace.size() == 10'000);
}

TEST_CASE("a workspace is empty after a move", "[workspace]") {
  Workspace source;
  std::byte* const memory = source.reserve(100);
  Workspace made(std::move(source));
  CHECK(made.size() == 100);
  CHECK(made.reserve(100) == memory);
  CHECK(source.size() == 0);

  Workspace assigned;
  assigned.reserve(500);  // is freed
  assigned = std::move(made);
  CHECK(assigned.reserve(100) == memory);
  CHECK(made.size() == 0);
  std::memset(made.reserve(8), 3, 8);

  Workspace& itself = assigned;
  assigned = std::move(itself);
  CHECK(assigned.size() == 100);
  CHECK(assigned.reserve(100) == memory);
}

}  // namespace
