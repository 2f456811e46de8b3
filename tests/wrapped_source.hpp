// A source of keys over another source.
#pragma once

#include <ssmax/key_source.hpp>

/// Has the keys of another source, without its optional members. A derived type hides what it changes.
template <class K>
struct WrappedSource {
  using Element = typename K::Element;
  const K& source;

  ssmax::KeySourceShape shape() const { return source.shape(); }
  ssmax::index_t length(ssmax::index_t b) const { return source.length(b); }
  ssmax::KeyRange stored(ssmax::index_t b) const { return source.stored(b); }
  ssmax::KeyRun<Element> run(ssmax::index_t b, ssmax::index_t h, ssmax::index_t key) const {
    return source.run(b, h, key);
  }
};
