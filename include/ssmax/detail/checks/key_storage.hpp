// Checks what the storage types of keys and values require: factors of rows (KeyScales) and whole groups of channels.
#pragma once

#include "../../storage.hpp"
#include "views.hpp"

SSMAX_BEGIN_DETAIL

/// Throws unless the width is a multiple of the number of channels that an element of X holds.
template <class X>
void check_group(const char* function, const char* name, const char* what, index_t width) {
  if constexpr (group_of<X> != 1) {
    if (width % group_of<X> != 0) {
      fail_value(function, name, what, width, "must be a multiple of the channels of an element,",
                 group_of<X>);
    }
  }
}

/// Throws unless `scales` has a factor for each row of `rows`. Exception: if X has no factors, throws if `scales` is
/// given. Exception: without rows, or with factors per channel, `scales` may be left out.
template <class X, int Rank>
void check_scales(const char* source, const char* name, const View<const float, Rank>& scales,
                  const char* rows_name, const View<const X, Rank + 1>& rows,
                  [[maybe_unused]] const View<const float, 3>& channel_scales = {}) {
  if constexpr (ScaledStorage<X>) {
    if (!is_given(scales)) {
      if (rows.empty() || is_given(channel_scales)) return;
      index_t count = 1;
      for (int i = 0; i < Rank; ++i) count *= rows.extent(i);
      fail_value(source, name, "has size", 0, "the storage type needs a factor per row:", count);
    }
    check_extents(source, name, scales);
    for (int i = 0; i < Rank; ++i) check_extent(source, name, scales, i, rows_name, rows, i);
    if (scales.empty()) return;
    check_reach(source, name, scales);
    if (scales.data_handle() == nullptr)
      fail_value(source, name, "is null but has size", scales.size(), "must be", 0);
  } else if (is_given(scales)) {
    fail_value(source, name, "has size", scales.size(), "the storage type has no factors: must be", 0);
  }
}

/// Throws unless `scales` is left out or has a factor for each page, kv head and channel of `rows`, [pages, keys of a
/// page, kv_heads, elements of a row]. If X has no factors, throws if `scales` is given.
template <class X>
void check_channel_scales(const char* source, const char* name, const View<const float, 3>& scales,
                          [[maybe_unused]] const char* rows_name,
                          [[maybe_unused]] const View<const X, 4>& rows) {
  if (!is_given(scales)) return;
  if constexpr (ScaledStorage<X>) {
    check_view(source, name, scales);
    check_extent(source, name, scales, 0, rows_name, rows, 0);
    check_extent(source, name, scales, 1, rows_name, rows, 2);
    const index_t width = rows.extent(3) * group_of<X>;
    if (scales.extent(2) != width) fail_extent(source, name, 2, scales.extent(2), rows_name, width);
  } else {
    fail_value(source, name, "has size", scales.size(), "the storage type has no factors: must be", 0);
  }
}

SSMAX_END
