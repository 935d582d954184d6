//! A team of threads that works through the tensors of a checkpoint.
//!
//! A thread that takes a unit of work (a tensor, or the tensors of a fused layer) *drives* it: it
//! runs the unit's code from top to bottom. Where that code calls [`Worker::each_band`], threads
//! without a unit help with the bands. A band is a whole task for one thread: some 100 µs of work
//! that begins with reading the band and ends with its output on the way to the writer. The driver
//! gets the results in order, so sums do not depend on the number of threads.
//!
//! Every thread of the CPU is a rayon pool of its own, so nothing below a band is split again.
//! Threads with a GPU drive whole tensors and do not help.

mod batch;
pub(crate) mod failure;
mod interrupt;
pub(crate) mod reply;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use microscale::Device;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};
use crate::pipeline::batch::{Bands, Batch};
use crate::pipeline::failure::Failure;
use crate::pipeline::interrupt::Interrupt;
use crate::pipeline::reply::Reply;
use crate::progress::Meter;

/// How long the workers may be silent before the caller is asked whether to go on.
pub(crate) const PATIENCE: Duration = Duration::from_millis(100);

/// The answer to a request for another unit.
pub(crate) enum Next<U> {
    /// A unit to drive.
    Unit(U),
    /// No unit now, but perhaps later: [`Team::wake`] follows.
    Later,
    /// No unit any more.
    None,
}

/// Threads, and the work that they share.
pub(crate) struct Team<'env> {
    state: Mutex<State<'env>>,
    changed: Condvar,
    interrupt: Interrupt,
    /// Units that are driven at a time while there are bands to help with.
    lanes: usize,
}

struct State<'env> {
    /// Batches of bands, oldest first. Some may have been taken completely.
    batches: Vec<Arc<dyn Bands + 'env>>,
    /// Units that are driven now.
    driven: usize,
    /// False once there are no more units.
    more: bool,
}

/// A thread of a team while it drives a unit.
pub(crate) struct Worker<'t, 'env> {
    team: &'t Team<'env>,
    /// The device that the thread works with.
    pub(crate) device: &'env Device,
}

/// The next step of a thread.
enum Step<'env, U> {
    Drive(U),
    Help(Arc<dyn Bands + 'env>),
    Stop,
}

/// Locks a mutex. A panic of another thread ends the whole operation, so poison means nothing here.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'env> Team<'env> {
    /// A team that drives `lanes` units at a time as long as they have enough bands for all
    /// threads.
    pub(crate) fn new(lanes: usize) -> Self {
        Self {
            state: Mutex::new(State { batches: Vec::new(), driven: 0, more: true }),
            changed: Condvar::new(),
            interrupt: Interrupt::default(),
            lanes,
        }
    }

    /// Runs threads for `devices` that take units from `take` and drive them, and `meanwhile` on
    /// this thread. `take` is called by one thread at a time.
    ///
    /// Fewer threads than devices do the work if the system refuses the rest.
    ///
    /// # Errors
    /// [`Error::Threads`] if the system refuses all threads.
    pub(crate) fn run<U: Send, R>(
        &self,
        devices: &'env [Device],
        take: &(dyn Fn() -> Next<U> + Sync),
        drive: &(dyn Fn(U, &Worker<'_, 'env>) + Sync),
        meanwhile: impl FnOnce() -> R,
    ) -> Result<R> {
        // Each device gets a pool of one thread, on which nested parallel iterators run
        // sequentially.
        let (mut pools, mut refused) = (Vec::with_capacity(devices.len()), None);
        for _ in devices {
            match ThreadPoolBuilder::new().num_threads(1).build() {
                Ok(pool) => pools.push(pool),
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        if let Some(error) = refused.filter(|_| pools.is_empty()) {
            return Err(Error::Threads(std::io::Error::other(error)));
        }
        let work = |thread: usize| self.work(&devices[thread], take, drive);
        Ok(with_threads(&pools, 0, &work, meanwhile))
    }

    /// Wakes threads that wait for a unit.
    pub(crate) fn wake(&self) {
        drop(lock(&self.state));
        self.changed.notify_all();
    }

    /// Makes all threads stop at the next band.
    pub(crate) fn interrupt(&self) {
        self.interrupt.set();
    }

    /// The work of one thread, until there is none left.
    fn work<U: Send>(
        &self,
        device: &'env Device,
        take: &(dyn Fn() -> Next<U> + Sync),
        drive: &(dyn Fn(U, &Worker<'_, 'env>) + Sync),
    ) {
        let helps = !device.has_memory();
        loop {
            match self.step(helps, take) {
                Step::Drive(unit) => {
                    drive(unit, &Worker { team: self, device });
                    lock(&self.state).driven -= 1;
                    self.changed.notify_all();
                }
                Step::Help(batch) => batch.help(&self.interrupt),
                Step::Stop => return,
            }
        }
    }

    /// Returns the next step of a thread. Waits while there is nothing to do.
    fn step<U: Send>(&self, helps: bool, take: &(dyn Fn() -> Next<U> + Sync)) -> Step<'env, U> {
        let mut state = lock(&self.state);
        loop {
            state.batches.retain(|batch| batch.has_more());
            let batch = state.batches.iter().filter(|_| helps).min_by_key(|batch| batch.helpers());
            let batch = batch.cloned();
            if state.more && (batch.is_none() || state.driven < self.lanes) {
                match take() {
                    Next::Unit(unit) => {
                        state.driven += 1;
                        return Step::Drive(unit);
                    }
                    Next::Later => {}
                    Next::None => state.more = false,
                }
            }
            if let Some(batch) = batch {
                batch.joined();
                return Step::Help(batch);
            }
            if !state.more && state.driven == 0 {
                self.changed.notify_all();
                return Step::Stop;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Starts `work` on the thread of each pool, calls `meanwhile`, and waits for all.
fn with_threads<R>(
    pools: &[ThreadPool],
    first: usize,
    work: &(dyn Fn(usize) + Sync),
    meanwhile: impl FnOnce() -> R,
) -> R {
    match pools.split_first() {
        None => meanwhile(),
        Some((pool, rest)) => pool.in_place_scope(|scope| {
            scope.spawn(|_| work(first));
            with_threads(rest, first + 1, work, meanwhile)
        }),
    }
}

impl<'env> Worker<'_, 'env> {
    /// Calls `band` for each number below `count`, on this thread and on helping threads, and
    /// `fold` with the results in order, on this thread.
    ///
    /// `band` must not wait for other work of the team.
    ///
    /// # Errors
    /// The first error in the order of the bands, [`Error::Interrupted`], and errors of `fold`.
    pub(crate) fn each_band<P: Send + 'env>(
        &self,
        count: usize,
        band: impl Fn(usize) -> Result<P> + Send + Sync + 'env,
        mut fold: impl FnMut(P) -> Result<()>,
    ) -> Result<()> {
        if count <= 1 || self.device.has_memory() {
            return (0..count).try_for_each(|number| {
                self.team.interrupt.go_on()?;
                fold(band(number)?)
            });
        }
        let (sender, results) = mpsc::channel();
        let batch = Arc::new(Batch::new(count, Box::new(band), sender));
        lock(&self.team.state).batches.push(batch.clone());
        self.team.changed.notify_all();
        let done = batch.drive(&self.team.interrupt, &results, &mut fold);
        // After an error, no other thread begins another band.
        batch.close();
        lock(&self.team.state).batches.retain(|batch| batch.has_more());
        done
    }

    /// # Errors
    /// [`Error::Interrupted`] if the caller broke off.
    pub(crate) fn go_on(&self) -> Result<()> {
        self.team.interrupt.go_on()
    }
}

/// A message of a worker to the thread that reports progress.
enum Message<R> {
    Begins(usize),
    Done(usize, Result<R>),
}

/// Does `work` with each unit, on a thread for each of `devices`, and returns the results in the
/// order of the units. `name` and `bytes` of a unit are for the meter.
///
/// # Errors
/// The error of the first unit that failed, [`Error::Interrupted`] if the meter breaks off,
/// [`Error::Threads`].
pub(crate) fn map<'env, U: Sync, R: Send>(
    units: &'env [U],
    devices: &'env [Device],
    meter: &mut Meter<'_, '_>,
    facts: impl Fn(&'env U) -> (&'env str, u64),
    work: &(dyn Fn(&'env U, &Worker<'_, 'env>) -> Result<R> + Sync),
) -> Result<Vec<R>> {
    let team = Team::new(1);
    let (next, stopped) = (Mutex::new(0), AtomicBool::new(false));
    let take = || {
        let mut next = lock(&next);
        if *next == units.len() || stopped.load(Ordering::Relaxed) {
            return Next::None;
        }
        *next += 1;
        Next::Unit(*next - 1)
    };
    let (sender, messages) = mpsc::channel();
    let drive = |number: usize, worker: &Worker<'_, 'env>| {
        // The receiver outlives all threads.
        let _ = sender.send(Message::Begins(number));
        let mut reply = Reply::new(&sender, Message::Done(number, Err(Error::Interrupted)));
        reply.message = Some(Message::Done(number, work(&units[number], worker)));
    };
    let (mut results, mut done) = (BTreeMap::new(), 0);
    let mut failure = Failure::default();
    team.run(devices, &take, &drive, || {
        // After an error, units that no thread has taken are left out.
        while done < if failure.is_some() { *lock(&next) } else { units.len() } {
            let go_on = match messages.recv_timeout(PATIENCE) {
                Err(RecvTimeoutError::Disconnected) => break,
                Ok(Message::Done(number, result)) => {
                    done += 1;
                    meter.done += facts(&units[number]).1;
                    match result {
                        Ok(result) => drop(results.insert(number, result)),
                        Err(error) => failure.at(number, error),
                    }
                    Ok(())
                }
                _ if failure.is_some() => continue,
                Err(RecvTimeoutError::Timeout) => meter.again(),
                Ok(Message::Begins(number)) => meter.before(facts(&units[number]).0),
            };
            if let Err(error) = go_on {
                team.interrupt();
                failure.by_caller(error);
            }
            stopped.fetch_or(failure.is_some(), Ordering::Relaxed);
        }
    })?;
    failure.into_result().map(|()| results.into_values().collect())
}
