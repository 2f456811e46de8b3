// Defines Datatype, an owner of an MPI datatype, and functions that make one.
#pragma once

#include <utility>

#include "requests.hpp"

SSMAX_BEGIN_DETAIL

/// An owner of an MPI datatype: the destructor frees it. Null stands for no data.
class Datatype {
 public:
  Datatype() = default;
  explicit Datatype(MPI_Datatype type) : type_(type) {}
  Datatype(Datatype&& other) noexcept : type_(std::exchange(other.type_, MPI_DATATYPE_NULL)) {}
  Datatype& operator=(Datatype&& other) noexcept {
    std::swap(type_, other.type_);
    return *this;
  }
  ~Datatype() {
    if (type_ != MPI_DATATYPE_NULL) MPI_Type_free(&type_);
  }
  [[nodiscard]] MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

/// Returns the datatype that `create` makes, ready to be sent. `call` is the name of the MPI function in
/// errors.
template <class Create>
Datatype make_datatype(const char* call, const Create& create) {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  check_mpi(call, create(&type));
  check_mpi("MPI_Type_commit", MPI_Type_commit(&type));
  return Datatype(type);
}

/// Returns the datatype of `bytes` contiguous bytes. Throws if MPI cannot count them.
inline Datatype bytes_type(std::size_t bytes) {
  const int count = Requests::count(bytes);
  return make_datatype("MPI_Type_contiguous",
                       [&](MPI_Datatype* to) { return MPI_Type_contiguous(count, MPI_BYTE, to); });
}

SSMAX_END
