// All that a model learns lies in one array of floats, and so do its gradients and the optimizer's averages:
// to add, clip, update or save them takes one loop. A Tensor says where in such an array a matrix lies.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "../layers.hpp"

namespace longcontext {

using examples::Matrix;
using ssmax::index_t;

// Aligned, since Eigen's sums take their terms in an order that depends on where an array begins.
using Values = std::vector<float, Eigen::aligned_allocator<float>>;

struct Tensor {
  index_t offset = 0, rows = 0, columns = 0;

  index_t size() const { return rows * columns; }
  std::span<const float> values(std::span<const float> all) const {
    return all.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(size()));
  }
  std::span<float> values(std::span<float> all) const {
    return all.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(size()));
  }
  Eigen::Map<const Matrix> matrix(std::span<const float> all) const {
    return {values(all).data(), rows, columns};
  }
  Eigen::Map<Matrix> matrix(std::span<float> all) const { return {values(all).data(), rows, columns}; }
};

// What a tensor holds before training.
struct Start {
  float constant, deviation;
};

class Layout {
 public:
  struct Entry {
    std::string name;
    Tensor tensor;
    std::vector<Start> starts;  // of blocks of columns, equally wide

    // Weight decay is for matrices: not for s, b and p.
    bool is_matrix() const { return tensor.rows > 1 && tensor.columns > 1; }
  };

  // A tensor without elements takes no place.
  Tensor add(const std::string& name, index_t rows, index_t columns, const std::vector<Start>& starts) {
    constexpr index_t line = 16;  // floats of a cache line, where every tensor begins
    const Tensor tensor{size_, rows, columns};
    size_ += (tensor.size() + line - 1) / line * line;
    if (tensor.size() > 0) entries_.push_back({name, tensor, starts});
    return tensor;
  }

  index_t size() const { return size_; }
  const std::vector<Entry>& entries() const { return entries_; }

  Values initial_values(examples::Random& random) const {
    Values all(static_cast<std::size_t>(size_));
    for (const auto& [name, tensor, starts] : entries_) {
      const index_t block = tensor.columns / static_cast<index_t>(starts.size());
      auto matrix = tensor.matrix(std::span(all));
      for (index_t row = 0; row < matrix.rows(); ++row) {
        for (index_t column = 0; column < matrix.cols(); ++column) {
          const Start& start = starts[static_cast<std::size_t>(column / block)];
          matrix(row, column) = start.deviation == 0 ? start.constant : start.deviation * random.standard();
        }
      }
    }
    return all;
  }

  // Tensors of the same name and size are taken over, others stay as they are.
  void take_over(std::span<float> all, const Layout& other, std::span<const float> others) const {
    for (const auto& to : entries_) {
      for (const auto& from : other.entries_) {
        if (to.name != from.name || to.tensor.size() != from.tensor.size()) continue;
        std::ranges::copy(from.tensor.values(others), to.tensor.values(all).begin());
      }
    }
  }

 private:
  std::vector<Entry> entries_;
  index_t size_ = 0;
};

}  // namespace longcontext
