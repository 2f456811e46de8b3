// Detects the members that make a type a mask. query.hpp documents the members.
#pragma once

#include <concepts>
#include <utility>

#include "../../fast_path.hpp"
#include "optional_member.hpp"

SSMAX_BEGIN_DATA

struct KeyRange;
struct QueryShape;
struct Query;

SSMAX_END

SSMAX_BEGIN_DETAIL

SSMAX_OPTIONAL_MEMBER(has_keys, "mask", keys, std::same_as<KeyRange>, "KeyRange keys(const Query&) const",
                      std::declval<const Query&>())
/// True if the mask may mask keys inside its range `keys`.
SSMAX_OPTIONAL_MEMBER(has_predicate, "mask", sees, std::same_as<bool>,
                      "bool sees(const Query&, index_t key) const", std::declval<const Query&>(), index_t{})
SSMAX_OPTIONAL_MEMBER(has_query_position, "mask", query_position, std::same_as<index_t>,
                      "index_t query_position(const Query&) const", std::declval<const Query&>())
SSMAX_OPTIONAL_MEMBER(has_key_position, "mask", key_position, std::same_as<index_t>,
                      "index_t key_position(const Query&, index_t key) const", std::declval<const Query&>(),
                      index_t{})
SSMAX_OPTIONAL_MEMBER(has_alignment, "mask", aligned, std::same_as<Query>,
                      "Query aligned(const Query&) const", std::declval<const Query&>())
SSMAX_OPTIONAL_MEMBER(has_mask_check, "mask", check, std::same_as<void>,
                      "void check(const QueryShape&) const", std::declval<const QueryShape&>())

SSMAX_OPTIONAL_MEMBER(has_run, "mask", run, std::same_as<KeyRange>,
                      "KeyRange run(const Query&, index_t from) const", std::declval<const Query&>(),
                      index_t{})
SSMAX_OPTIONAL_MEMBER(has_count, "mask", count, std::same_as<index_t>, "index_t count(const Query&) const",
                      std::declval<const Query&>())

SSMAX_OPTIONAL_MEMBER(has_same_runs, "mask", same_runs, std::same_as<bool>,
                      "bool same_runs(const Query&, const Query& other) const", std::declval<const Query&>(),
                      std::declval<const Query&>())

SSMAX_OPTIONAL_FLAG("mask", rotated_to_positions)
/// True for masks that count the rows of a call without SequenceLengths.
SSMAX_OPTIONAL_FLAG("mask", refuses_lengths)

template <class M>
consteval bool is_mask() {
  if constexpr (has_keys<M>) {
    static_assert(!by_lanes<M> && !by_row<M> && !by_size<M>, "ssmax: the fast path of a mask is same_keys");
    // Each trait reports a member of its name that has a wrong signature.
    (void)has_predicate<M>, (void)has_query_position<M>, (void)has_key_position<M>;
    (void)has_alignment<M>, (void)has_mask_check<M>, (void)rotated_to_positions<M>, (void)refuses_lengths<M>;
    static_assert(
        has_predicate<M> || !(has_run<M> || has_count<M>),
        "ssmax: a mask with run or count needs the member  bool sees(const Query&, index_t key) const");
    static_assert(
        has_run<M> || !has_same_runs<M>,
        "ssmax: a mask with same_runs needs the member  KeyRange run(const Query&, index_t from) const");
  }
  return has_keys<M>;
}

/// True if the mask's runs can be found without a test of every key.
template <class M>
constexpr bool has_known_runs = has_run<M> || !has_predicate<M>;

template <class M>
constexpr bool defines_positions = has_query_position<M> || has_key_position<M> || has_alignment<M>;

SSMAX_END
