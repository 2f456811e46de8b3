// Tensors that lie anywhere: dimensions in any order, gaps, steps backwards, broadcasts, no alignment. The
// memory is exactly as long as what the view reaches, so that AddressSanitizer sees a step beside it.
#pragma once

#include <cstring>
#include <memory>
#include <numeric>
#include <ssmax/view.hpp>
#include <string>
#include <vector>

#include "../reference.hpp"
#include "element.hpp"
#include "finding.hpp"

namespace fuzz {

using ssmax::View;

/// How a tensor lies, drawn before its element type is known.
struct Layout {
  std::array<int, 4> order{3, 2, 1, 0};  // of the dimensions, the innermost first
  index_t step = 1;                      // stride of the innermost dimension
  std::array<index_t, 4> gaps{};         // elements between the rows of a dimension
  std::array<bool, 3> backwards{};
  std::array<bool, 3> broadcast{};  // stride 0
  index_t before = 0;               // elements before the first one

  std::string words() const {
    std::string text = "order";
    for (int i : order) text += std::to_string(i);
    text += " gaps";
    for (index_t gap : gaps) text += " " + std::to_string(gap);
    for (std::size_t i = 0; i < 3; ++i) {
      if (backwards[i]) text += " backwards" + std::to_string(i);
      if (broadcast[i]) text += " broadcast" + std::to_string(i);
    }
    return text + " offset " + std::to_string(before) + " step " + std::to_string(step);
  }
};

/// `any_stride`: the last stride may be any number.
inline Layout draw_layout(Random& random, bool may_broadcast, bool any_stride = false) {
  Layout layout;
  if (random.chance(0.3)) return layout;
  const index_t first = any_stride && random.chance(0.4) ? 0 : 1;
  for (index_t i = 3; i > first; --i) {
    std::swap(layout.order[static_cast<std::size_t>(i)],
              layout.order[static_cast<std::size_t>(random.between(first, i))]);
  }
  if (first == 0) layout.step = random.between(1, 3);
  for (index_t& gap : layout.gaps) gap = random.chance(0.4) ? random.between(1, 7) : 0;
  for (bool& backwards : layout.backwards) backwards = random.chance(0.12);
  for (bool& broadcast : layout.broadcast) broadcast = may_broadcast && random.chance(0.06);
  layout.before = random.chance(0.5) ? random.between(1, 9) : 0;
  return layout;
}

/// A tensor of rank 4. What lies between its elements is NaN with a pattern, and has to stay so.
template <class T>
class Tensor {
 public:
  Tensor(const std::array<index_t, 4>& extents, const Layout& layout) : extents_(extents) {
    const auto part = [&](std::size_t i) { return extents_[i]; };
    index_t stride = layout.step, reach = 1;
    for (const int dimension : layout.order) {
      const auto i = static_cast<std::size_t>(dimension);
      if (i < 3 && layout.broadcast[i]) continue;
      strides_[i] = stride;
      reach += (std::max<index_t>(part(i), 1) - 1) * stride;
      stride = stride * std::max<index_t>(part(i), 1) + layout.gaps[i];
    }
    bool empty = false;
    for (const index_t extent : extents_) empty = empty || extent == 0;
    size_ = static_cast<std::size_t>(empty ? 0 : layout.before + reach);
    first_ = layout.before;
    for (std::size_t i = 0; i < 3; ++i) {
      if (!layout.backwards[i] || empty) continue;
      first_ += (part(i) - 1) * strides_[i];
      strides_[i] = -strides_[i];
    }
    take_memory();
  }

  /// Columns of one matrix [batch, position, head, channel]: the tensors' heads lie one behind the other.
  static std::vector<Tensor> packed(const std::vector<std::array<index_t, 4>>& extents, index_t gap) {
    index_t heads = 0;
    for (const auto& e : extents) heads += e[1];
    const auto [batch, unused, positions, d] = extents[0];
    const index_t pitch = heads * d + gap;
    std::vector<Tensor> result;
    index_t first = 0;
    for (const auto& e : extents) {
      Tensor tensor(e);
      tensor.strides_ = {positions * pitch, d, pitch, 1};
      tensor.first_ = first;
      tensor.size_ = static_cast<std::size_t>(batch * positions * pitch);
      first += e[1] * d;
      if (result.empty()) {
        tensor.take_memory();
      } else {
        tensor.memory_ = result[0].memory_;
      }
      result.push_back(std::move(tensor));
    }
    return result;
  }

  View<T, 4> view() const { return {size_ == 0 ? nullptr : memory_.get() + first_, extents_, strides_}; }
  /// Of rank 3, where the first extent is 1.
  View<T, 3> trailing() const {
    return {view().data_handle(),
            {extents_[1], extents_[2], extents_[3]},
            {strides_[1], strides_[2], strides_[3]}};
  }
  std::size_t count() const {
    return static_cast<std::size_t>(extents_[0] * extents_[1] * extents_[2] * extents_[3]);
  }
  /// Values in [0, 1, 2, 3] order.
  void fill(const std::vector<double>& values) const {
    std::size_t next = 0;
    for_each([&](T& element) { element = narrow<T>(values[next++]); });
  }
  /// What a broadcast leaves of values: those that were written last.
  std::vector<double> values() const {
    std::vector<double> result;
    result.reserve(count());
    for_each([&](T& element) { result.push_back(widen(element)); });
    return result;
  }
  std::vector<unsigned char> bytes() const {
    std::vector<unsigned char> copy(size_ * sizeof(T));
    if (!copy.empty()) std::memcpy(copy.data(), memory_.get(), copy.size());
    return copy;
  }
  /// Gives the elements the pattern of what lies between them.
  void erase() const {
    for_each([&](T& element) { std::memset(static_cast<void*>(&element), pattern, sizeof(T)); });
  }
  /// Throws if anything but the elements, which have been erased, has been written.
  void check_erased(const std::string& name) const {
    for (const unsigned char byte : bytes()) {
      if (byte != pattern) throw Finding(name + ": written beside the elements of the view");
    }
  }
  void check_untouched(const std::string& name, const std::vector<unsigned char>& before) const {
    if (bytes() != before) throw Finding(name + " is an input and has changed");
  }

 private:
  explicit Tensor(const std::array<index_t, 4>& extents) : extents_(extents) {}
  void take_memory() {
    memory_ = std::shared_ptr<T[]>(new T[size_]);
    std::memset(static_cast<void*>(memory_.get()), pattern, size_ * sizeof(T));
  }

  static constexpr unsigned char pattern = 0xFF;  // NaN in every type

  template <class F>
  void for_each(const F& f) const {
    const View<T, 4> all = view();
    reference::for_each_index(extents_, [&](auto... at) { f(all(at...)); });
  }

  std::array<index_t, 4> extents_;
  std::array<index_t, 4> strides_{};
  index_t first_ = 0;
  std::size_t size_ = 0;
  std::shared_ptr<T[]> memory_;
};

}  // namespace fuzz
