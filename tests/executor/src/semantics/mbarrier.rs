//! The counts of an mbarrier (ISA 9.7.13.15): pending arrivals and bytes of its phase.

/// Maximum number of arrivals per phase, and of bytes that are pending or came early.
const MOST: i64 = (1 << 20) - 1;

/// An mbarrier's counts.
#[derive(Clone, Debug)]
pub(crate) struct Counts {
    expected: u32,
    pending: u32,
    /// Expected bytes that have not come. Negative if bytes come before a thread expects them.
    bytes: i64,
    /// Number of completed phases.
    pub(crate) phase: u32,
}

/// A violated rule of mbarriers.
type Problem = &'static str;

impl Counts {
    /// `mbarrier.init`
    pub(crate) fn new(expected: u32) -> Result<Self, Problem> {
        if expected == 0 || i64::from(expected) > MOST {
            return Err("an mbarrier's count must be from 1 to 2^20 - 1");
        }
        Ok(Self { expected, pending: expected, bytes: 0, phase: 0 })
    }

    /// `mbarrier.arrive`. Returns whether the phase is complete.
    pub(crate) fn arrive(&mut self) -> Result<bool, Problem> {
        if self.pending == 0 {
            return Err("more arrivals at an mbarrier than it expects");
        }
        self.pending -= 1;
        Ok(self.turn())
    }

    /// Waits for one more arrival in this phase.
    pub(crate) fn expect_arrival(&mut self) -> Result<(), Problem> {
        if i64::from(self.pending) == MOST {
            return Err("more arrivals than an mbarrier can count");
        }
        self.pending += 1;
        Ok(())
    }

    /// `expect_tx`: `bytes` more bytes must come before the phase is complete.
    pub(crate) fn expect(&mut self, bytes: u32) -> Result<(), Problem> {
        self.count(i64::from(bytes))
    }

    /// `complete_tx`: `bytes` bytes have come. Returns whether the phase is complete.
    pub(crate) fn complete(&mut self, bytes: usize) -> Result<bool, Problem> {
        self.count(-(bytes as i64))?;
        Ok(self.turn())
    }

    fn count(&mut self, bytes: i64) -> Result<(), Problem> {
        self.bytes += bytes;
        if self.bytes.abs() > MOST {
            return Err("more bytes than an mbarrier can count");
        }
        Ok(())
    }

    /// Completes a phase without pending arrivals and bytes, and starts the next one.
    fn turn(&mut self) -> bool {
        let complete = self.pending == 0 && self.bytes == 0;
        if complete {
            self.pending = self.expected;
            self.phase += 1;
        }
        complete
    }

    /// `try_wait.parity`: returns whether the phase of this parity is complete.
    ///
    /// The phase is the current or the previous one.
    pub(crate) fn passed(&self, parity: u32) -> bool {
        self.phase & 1 != parity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_needs_its_arrivals_and_its_bytes() {
        let mut counts = Counts::new(2).unwrap();
        assert!(counts.passed(1) && !counts.passed(0));
        counts.expect(48).unwrap();
        assert!(!counts.arrive().unwrap());
        assert!(!counts.complete(32).unwrap());
        assert!(!counts.arrive().unwrap());
        assert!(counts.arrive().is_err());
        assert!(counts.complete(16).unwrap());
        assert!(counts.passed(0) && !counts.passed(1));
        // Bytes may come before a thread expects them.
        assert!(!counts.complete(16).unwrap());
        assert!(!counts.arrive().unwrap());
        counts.expect(16).unwrap();
        assert!(counts.arrive().unwrap());
        assert_eq!(counts.phase, 2);
    }

    #[test]
    fn counts_have_limits() {
        assert!(Counts::new(0).is_err() && Counts::new(1 << 20).is_err());
        let mut counts = Counts::new((1 << 20) - 1).unwrap();
        counts.expect((1 << 20) - 1).unwrap();
        assert!(counts.expect(1).is_err());
    }
}
