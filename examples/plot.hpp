// Draws curves as PNG by gnuplot. The script and its data stay beside the picture, so that you can edit the
// script and run it again.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace examples {

struct Curve {
  std::string label;  // empty: no entry in the legend
  std::string style;  // options after gnuplot's `with`
  std::vector<double> x, y;
};

struct Plot {
  std::string name;  // of the files name.gp and name.png
  std::string title, x_label, y_label;
  std::vector<std::string> settings;  // additional gnuplot lines: axes, legend
  std::vector<Curve> curves;
};

namespace detail {

inline std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char letter : text) out += letter == '\'' ? "''" : std::string(1, letter);
  return out + "'";
}

inline void write_script(const Plot& plot, std::ostream& out) {
  out << "set terminal pngcairo size 1000,640 font 'Sans,13'\n"
      << "set output " << quoted(plot.name + ".png") << "\n"
      << "set title " << quoted(plot.title) << " font ',15'\n"
      << "set xlabel " << quoted(plot.x_label) << "\n"
      << "set ylabel " << quoted(plot.y_label) << "\n"
      << "set grid linecolor rgb '#d8d8d8' linetype 1\n"
      << "set border 3\nset tics nomirror\nset key right Left reverse\n";
  for (const auto& line : plot.settings) out << line << "\n";
  out.precision(9);
  for (std::size_t c = 0; c < plot.curves.size(); ++c) {
    out << "$curve" << c << " << END\n";
    for (std::size_t i = 0; i < plot.curves[c].x.size(); ++i) {
      out << plot.curves[c].x[i] << ' ' << plot.curves[c].y[i] << "\n";
    }
    out << "END\n";
  }
  for (std::size_t c = 0; c < plot.curves.size(); ++c) {
    const auto& [label, style, x, y] = plot.curves[c];
    out << (c == 0 ? "plot " : ", \\\n     ") << "$curve" << c << " with " << style
        << (label.empty() ? " notitle" : " title " + quoted(label));
  }
  out << "\n";
}

// Runs gnuplot inside the folder, so that no path from outside reaches a shell.
class InFolder {
 public:
  explicit InFolder(const std::filesystem::path& folder) : before_(std::filesystem::current_path()) {
    std::filesystem::current_path(folder);
  }
  ~InFolder() {
    std::error_code ignored;
    std::filesystem::current_path(before_, ignored);
  }
  InFolder(const InFolder&) = delete;
  InFolder& operator=(const InFolder&) = delete;

 private:
  std::filesystem::path before_;
};

inline bool has_gnuplot() {
#ifdef _WIN32
  return std::system("gnuplot --version >NUL 2>&1") == 0;
#else
  return std::system("gnuplot --version >/dev/null 2>&1") == 0;
#endif
}

}  // namespace detail

// Writes folder/name.gp and, if gnuplot is installed, folder/name.png. Prints the names of the files to
// stdout.
inline void draw(const Plot& plot, const std::filesystem::path& folder) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (!std::filesystem::is_directory(folder, failed)) {
    throw std::runtime_error("cannot create the folder " + folder.string());
  }
  const auto script = folder / (plot.name + ".gp");
  std::ofstream file(script);
  detail::write_script(plot, file);
  file.close();
  if (!file) throw std::runtime_error("cannot write " + script.string());

  if (!detail::has_gnuplot()) {
    std::printf(
        "No picture: gnuplot was not found. Install it with `sudo apt install gnuplot-nox`,\n"
        "then run `gnuplot %s.gp` in %s\n",
        plot.name.c_str(), folder.string().c_str());
    return;
  }
  const detail::InFolder inside(folder);
  if (std::system(("gnuplot " + plot.name + ".gp").c_str()) != 0) {
    throw std::runtime_error("gnuplot failed on " + script.string());
  }
  std::printf("Plot: %s\n", (folder / (plot.name + ".png")).string().c_str());
}

}  // namespace examples
