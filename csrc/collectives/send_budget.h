// The sends in flight that all ring all-reduces of an engine share.
#pragma once

namespace hvpipe {

// A number of sends that may be in flight at the same time. Returned sends become available at the next pass,
// and the most urgent collective is stepped first. So a small bucket that the next forward pass needs first
// overtakes a large one, which would otherwise keep its share of the sends.
//
// Threads: driving thread only.
class SendBudget {
 public:
  explicit SendBudget(int messages) : messages_(messages), available_(messages) {}

  bool empty() const { return available_ == 0; }
  void Take() {
    if (--available_ == 0) since_s_ = now_s_;
  }
  void Return() { ++returned_; }

  void BeginPass(double now_s) {
    now_s_ = now_s;
    if (returned_ == 0) return;
    // Measures only times in which the budget was spent, i.e. the network always had something to send.
    if (empty()) each_s_ += 0.25 * ((now_s - since_s_) / returned_ - each_s_);
    since_s_ = now_s;
    available_ += returned_;
    returned_ = 0;
  }

  // Seconds until a quarter of the sends in flight will have ended, at the recent rate. Looking more often
  // gains nothing and takes cache and time from computing threads.
  double QuarterS() const { return each_s_ * messages_ / 4; }

 private:
  int messages_, available_;
  int returned_ = 0;
  double each_s_ = 0;   // per send, a running average
  double now_s_ = 0;    // of this pass
  double since_s_ = 0;  // when sends last came back, or when the last one was taken
};

}  // namespace hvpipe
