// All parameters of a model are in one array of floats, and so are the gradients and the optimizer's
// averages. One loop adds, clips, updates or saves all of them. A Tensor is the place of a matrix in such
// an array.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "../layers.hpp"

namespace longcontext {

using examples::Matrix;
using ssmax::index_t;

// Aligned, because Eigen's order of summation depends on the alignment of an array.
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

// The initial values of a tensor: a constant, or random numbers with this deviation.
struct Start {
  float constant, deviation;
};

class Layout {
 public:
  struct Entry {
    std::string name;
    Tensor tensor;
    std::vector<Start> starts;  // one per block of columns; the blocks have equal width

    // Returns true for matrices. Only matrices have weight decay: s, b and p have not.
    bool is_matrix() const { return tensor.rows > 1 && tensor.columns > 1; }
  };

  // Adds a tensor and returns its place. A tensor without elements uses no memory.
  Tensor add(const std::string& name, index_t rows, index_t columns, const std::vector<Start>& starts) {
    constexpr index_t line = 16;  // floats of a cache line; every tensor starts at a cache line
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

  // Copies the tensors that have the same name and size in both layouts. Other tensors do not change.
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
