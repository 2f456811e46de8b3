// Defines PlannedMask, the mask of a plan. Its type is erased, so that the type of the plan does not name it.
#pragma once

#include <cstdint>
#include <memory>

#include "policies.hpp"

SSMAX_BEGIN_DETAIL

/// A mask without its type: the variant of a call without scaling and score function.
template <class A>
class MaskVariant : public Variant<A> {
 public:
  const bool moves_keys;  // the mask defines positions of keys

  virtual ~MaskVariant() = default;
  /// Returns UserMask::masked_row.
  virtual QueryRow find_row(const Query& query, KeyRange stored, Row& scaled) const = 0;

 protected:
  explicit MaskVariant(const VariantFacts& facts, bool moves) : Variant<A>(facts), moves_keys(moves) {}
};

/// The same with the type, as the base of UserMask.
template <class A, class M>
class MaskVariantOf : public MaskVariant<A> {
 protected:
  explicit MaskVariantOf(const VariantFacts& facts) : MaskVariant<A>(facts, has_key_position<M>) {}
};

/// A mask and its variant.
template <class A, class M>
class OwnedMask final
    : public UserVariant<A, Softmax, M, Identity, UserScore<A, M, Identity, MaskVariantOf<A, M>>> {
  using Base = UserVariant<A, Softmax, M, Identity, UserScore<A, M, Identity, MaskVariantOf<A, M>>>;

 public:
  explicit OwnedMask(const M& a_mask) : Base(default_scaling, owned_, default_score), owned_(a_mask) {}

  QueryRow find_row(const Query& query, KeyRange stored, Row& scaled) const override {
    return this->masked_row(query, stored, scaled);
  }

 private:
  const M owned_;  // that the base refers to
};

/// The mask of a plan, in place of M in a variant.
template <class A>
class PlannedMask {
 public:
  template <class M>
  explicit PlannedMask(const M& a_mask) : variant_(std::make_unique<const OwnedMask<A, M>>(a_mask)) {}

  const MaskVariant<A>& variant() const { return *variant_; }

 private:
  std::unique_ptr<const MaskVariant<A>> variant_;
};

template <class A>
VariantFacts facts_of_mask(const PlannedMask<A>& mask) {
  return mask.variant();
}

/// Implements the functions of Variant that depend on the mask by those of the plan's variant.
template <class Compute, class Interface>
class UserMask<Compute, PlannedMask<Compute>, Interface> : public Interface {
 public:
  const PlannedMask<Compute>& mask;

  index_t query_position(const Query& query) const override { return of_plan().query_position(query); }
  index_t key_position(const Query& query, index_t key) const override {
    return of_plan().key_position(query, key);
  }
  bool sees(const Query& query, index_t key) const override {
    return !this->has_predicate || of_plan().sees(query, key);
  }
  bool has_same_runs(const QueryRow* rows, index_t count) const override {
    return of_plan().has_same_runs(rows, count);
  }
  index_t next_visible(const QueryRow* rows, index_t count, index_t from) const override {
    return of_plan().next_visible(rows, count, from);
  }
  std::uint32_t visible_blocks(const QueryRow* rows, index_t count, KeyRange keys,
                               index_t block_keys) const override {
    return of_plan().visible_blocks(rows, count, keys, block_keys);
  }
  Hull hull(const QueryRow* rows, index_t count, KeyRange keys) const override {
    return of_plan().hull(rows, count, keys);
  }
  void mask_runs(const Logits<Compute>& logits, const TileScratch<Compute>& memory) const override {
    of_plan().mask_runs(logits, memory);
  }
  void check_mask(const QueryShape& shape) const override { of_plan().check_mask(shape); }
  index_t first_visible(const Query& query, KeyRange range) const override {
    return of_plan().first_visible(query, range);
  }

 protected:
  UserMask(const VariantFacts& facts, const PlannedMask<Compute>& a_mask) : Interface(facts), mask(a_mask) {}

  static constexpr bool is_erased = true;
  bool moves_keys() const { return of_plan().moves_keys; }
  QueryRow masked_row(const Query& query, KeyRange stored, Row& scaled) const {
    return of_plan().find_row(query, stored, scaled);
  }
  void mask_single(const Logits<Compute>& logits, const TileScratch<Compute>& memory) const {
    of_plan().apply(logits, memory);
  }
  void mask_row(Compute* s, KeyRange keys, const QueryRow& row) const { of_plan().apply(s, keys, row); }

 private:
  const MaskVariant<Compute>& of_plan() const { return mask.variant(); }
};

SSMAX_END
