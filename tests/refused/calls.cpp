// Temporaries whose elements a call would refer to after their end, and types of a cache that do not fit.
//
// case DOUBLE_VALUES_IN_CACHE: keys and values are computed in one type: double keys need double values
// case VIEW_OF_TEMPORARY: the view of a temporary would dangle: give the vector a name
// case SSMAX_OF_TEMPORARY: a temporary ends before the span is used: give the vector a name
// case SSMAX_OF_TEMPORARY_B: a temporary ends before the span is used: give the vector a name
// case SSMAX_OF_TEMPORARY_DEDUCED: a temporary ends before the span is used: give the vector a name
// case TABLE_OF_TEMPORARY: a temporary ends before the span is used: give the vector a name
// case SOURCE_OF_TEMPORARY: the source refers to the cache: give the cache a name
#include <array>
#include <ssmax/ssmax.hpp>
#include <vector>

using namespace ssmax;

int main() {
  std::vector<float> s(1), b(1);
  const SSMax scaling{s, b};
  View<const float, 1> row = s, of_span = std::span<const float>(s);

#if defined(DOUBLE_VALUES_IN_CACHE)
  const KvCache<float, double> mixed({.width = 4, .capacity = 4});
#elif defined(VIEW_OF_TEMPORARY)
  row = View<const float, 1>{std::vector<float>(4)};
#elif defined(SSMAX_OF_TEMPORARY)
  const SSMax<float> dangling{std::vector<float>(1)};
#elif defined(SSMAX_OF_TEMPORARY_B)
  const SSMax<float> dangling{s, std::array<float, 1>{}};
#elif defined(SSMAX_OF_TEMPORARY_DEDUCED)
  const SSMax dangling{std::vector<float>(1)};
#elif defined(TABLE_OF_TEMPORARY)
  const SizeTable<float> dangling{std::vector<float>(9), s};
#elif defined(SOURCE_OF_TEMPORARY)
  const auto dangling = PagedKvCache<float>({.width = 4, .pages = 1}).source({});
#endif
}
