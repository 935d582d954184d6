//! Workers that rewrite the tensors of shards: several of them, each with its own device or a part of one.
//!
//! A worker takes a tensor, works out what becomes of it, and writes that. So reading, computing and writing
//! go on at once, and as few tensors are in memory as there are workers. They keep to different shards where
//! they can, because a file is written by one thread at a time; and to as few as that needs, so that shards
//! are finished one after the other.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope};
use std::time::Duration;

use microscale::Device;

use crate::error::{Error, Result};
use crate::read::shard::Shard;
use crate::read::tensor::Tensor;
use crate::write::begin::begin;
use crate::write::progress::Meter;
use crate::write::work::{Renamed, Rewrite};
use crate::write::writer::{Sink, Writer};

/// How long workers may be silent before the caller is asked whether to go on.
const PATIENCE: Duration = Duration::from_millis(100);

/// Shards that may wait for the disk at once, each with an open file and a thread.
const MOST_FINISHING: usize = 4;

/// A shard, and the file that is to be written of it.
pub(crate) struct ShardOutput<'a> {
    pub(crate) shard: &'a Shard,
    pub(crate) path: PathBuf,
}

/// Tensors of a shard that are written together, by their numbers.
type Unit = Vec<usize>;

/// A shard that is being written.
struct Open<'a, D> {
    /// Its place in the list of outputs.
    index: usize,
    tensors: Vec<Tensor<'a>>,
    /// Units that no worker has taken yet.
    units: VecDeque<Unit>,
    /// The number of units being worked on.
    taken: usize,
    writer: Arc<Mutex<Writer>>,
    renamed: Renamed,
    /// The results of the tensors that are done, by number.
    done: Vec<Option<D>>,
}

/// The schedule: the work that is still to do.
struct Schedule<'a, R: Rewrite> {
    outputs: &'a [ShardOutput<'a>],
    work: &'a R,
    /// True if the tensors of a layer are taken together.
    by_layer: bool,
    workers: usize,
    /// The first shard that is not open yet.
    next: usize,
    open: Vec<Open<'a, R::Done>>,
    /// The number of shards that wait for the disk.
    finishing: usize,
    stopped: bool,
}

/// The work that a worker takes at once.
struct Taken<'a> {
    index: usize,
    unit: Unit,
    tensors: Vec<Tensor<'a>>,
    writer: Arc<Mutex<Writer>>,
}

/// A message of a worker.
enum Told<D> {
    /// A tensor of this name comes next.
    Begins(String),
    /// So many bytes of the input are done.
    Done(u64),
    /// A shard is complete, on the disk too. Its file has `bytes` bytes.
    Complete { index: usize, renamed: Renamed, bytes: u64, done: Vec<D> },
    /// An error in the shard of this number.
    Failed(usize, Error),
}

/// Writes shards to files that do not exist yet, and returns what became of their tensors, in the order of
/// the shards. `complete` is called for each shard once it is on the disk, in any order, with the bytes of its
/// file.
///
/// # Errors
/// The workers' error in the first shard that has one; [`Error::Interrupted`]; [`Error::Threads`]; errors of
/// `complete`.
pub(crate) fn write_shards<R: Rewrite>(
    outputs: &[ShardOutput<'_>],
    work: &R,
    device: &Device,
    meter: &mut Meter<'_, '_>,
    mut complete: impl FnMut(&ShardOutput<'_>, Renamed, u64, &[R::Done]) -> Result<()>,
) -> Result<Vec<R::Done>> {
    let tensors = outputs.iter().flat_map(|output| output.shard.tensors());
    let largest = tensors.map(|tensor| work.bytes(&tensor)).max();
    let devices = device.workers(largest.unwrap_or(0)).map_err(Error::Device)?;
    let schedule = Mutex::new(Schedule {
        outputs,
        work,
        by_layer: device.has_memory(),
        workers: devices.len(),
        next: 0,
        open: Vec::new(),
        finishing: 0,
        stopped: false,
    });
    // Workers look at it within a tensor. An error does not set it: the first one of all that are being met is told.
    let interrupted = AtomicBool::new(false);
    let mut shards: Vec<_> = outputs.iter().map(|_| Vec::new()).collect();
    let mut failed: Option<(usize, Error)> = None;
    std::thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        for (started, device) in devices.iter().enumerate() {
            let (schedule, interrupted, tell) = (&schedule, &interrupted, tell.clone());
            let work = move || work_through(scope, schedule, interrupted, device, &tell);
            if let Err(error) = Builder::new().spawn_scoped(scope, work) {
                // The workers that have started do all of the work.
                failed = (started == 0).then_some((0, Error::Threads(error)));
                break;
            }
        }
        drop(tell);
        loop {
            let told = match told.recv_timeout(PATIENCE) {
                Err(RecvTimeoutError::Disconnected) => break,
                told => told.ok(),
            };
            let (index, result) = match told {
                None if failed.is_some() => continue,
                None => (usize::MAX, meter.again()),
                Some(Told::Begins(tensor)) => (usize::MAX, meter.before(&tensor)),
                Some(Told::Done(bytes)) => {
                    meter.done += bytes;
                    continue;
                }
                Some(Told::Complete { index, renamed, bytes, done }) if failed.is_none() => {
                    shards[index] = done;
                    (index, complete(&outputs[index], renamed, bytes, &shards[index]))
                }
                Some(Told::Complete { .. }) => continue,
                Some(Told::Failed(index, error)) => (index, Err(error)),
            };
            if let Err(error) = result {
                lock(&schedule).stopped = true;
                interrupted.fetch_or(matches!(error, Error::Interrupted), Ordering::Relaxed);
                if failed.as_ref().is_none_or(|(first, _)| index < *first) {
                    failed = Some((index, error));
                }
            }
        }
    });
    match failed {
        None => Ok(shards.into_iter().flatten().collect()),
        Some((_, error)) => Err(error),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic of a worker ends the whole operation.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes units of work and writes them until there are none left.
fn work_through<'scope, 'a: 'scope, R: Rewrite>(
    scope: &'scope Scope<'scope, '_>,
    schedule: &'scope Mutex<Schedule<'a, R>>,
    interrupted: &AtomicBool,
    device: &Device,
    tell: &Sender<Told<R::Done>>,
) where
    R::Done: 'scope,
{
    // Nobody listens any more only if the operation has ended.
    let say = |told| drop(tell.send(told));
    loop {
        let (taken, work) = {
            let mut schedule = lock(schedule);
            match schedule.take() {
                Ok(Some(taken)) => (taken, schedule.work),
                Ok(None) => return,
                Err(error) => return say(Told::Failed(schedule.next - 1, error)),
            }
        };
        let Taken { index, unit, tensors, writer } = taken;
        if let Some(first) = tensors.first() {
            say(Told::Begins(first.name.into()));
        }
        let done = work.write(&tensors, device, &Sink::new(&writer, interrupted));
        drop(writer);
        let done = match done {
            Ok(done) => done,
            Err(error) => return say(Told::Failed(index, error)),
        };
        let (complete, shard) = {
            let mut schedule = lock(schedule);
            (schedule.give(index, &unit, done), schedule.outputs[index].shard)
        };
        tensors.iter().for_each(|tensor| shard.forget(tensor.data));
        say(Told::Done(tensors.iter().map(|tensor| tensor.data.len() as u64).sum()));
        if let Some(open) = complete {
            // It stays here if no thread takes it.
            let waiting = Arc::new(Mutex::new(Some(open)));
            let (schedule, tell) = (schedule, tell.clone());
            let finish = move || {
                let open = lock(&waiting).take();
                open.into_iter().for_each(|open| drop(tell.send(open.finish())));
                lock(schedule).finishing -= 1;
            };
            let has_room = lock(schedule).begin_finishing();
            // The disk works on it while the next shard is worked out.
            if !has_room || Builder::new().spawn_scoped(scope, finish.clone()).is_err() {
                finish();
            }
        }
    }
}

impl<D> Open<'_, D> {
    /// Waits until a shard is on the disk whose tensors are all written.
    fn finish(self) -> Told<D> {
        let Self { index, writer, renamed, done, .. } = self;
        let Some(writer) = Arc::into_inner(writer) else {
            unreachable!("workers let go of a shard before it is finished")
        };
        match writer.into_inner().unwrap_or_else(PoisonError::into_inner).finish() {
            Ok(bytes) => Told::Complete { index, renamed, bytes, done: done.into_iter().flatten().collect() },
            Err(error) => Told::Failed(index, error),
        }
    }
}

impl<'a, R: Rewrite> Schedule<'a, R> {
    /// Takes the next unit of work; `None` at the end. An error is about the shard before `next`.
    fn take(&mut self) -> Result<Option<Taken<'a>>> {
        if self.stopped {
            return Ok(None);
        }
        let least = self.least_taken();
        let all_busy = least.is_none_or(|open| self.open[open].taken > 0);
        let open = if all_busy && self.open.len() < self.workers && self.next < self.outputs.len() {
            Some(self.open_next()?)
        } else {
            least
        };
        let Some(open) = open else { return Ok(None) };
        let open = &mut self.open[open];
        let Some(unit) = open.units.pop_front() else { return Ok(None) };
        open.taken += 1;
        let tensors = unit.iter().map(|number| open.tensors[*number]).collect();
        Ok(Some(Taken { index: open.index, unit, tensors, writer: open.writer.clone() }))
    }

    /// The first of the shards with units left on which the fewest workers work.
    fn least_taken(&self) -> Option<usize> {
        let waiting = self.open.iter().enumerate().filter(|(_, open)| !open.units.is_empty());
        waiting.min_by_key(|(_, open)| (open.taken, open.index)).map(|(open, _)| open)
    }

    /// Begins another shard.
    fn open_next(&mut self) -> Result<usize> {
        let index = self.next;
        self.next += 1;
        let ShardOutput { shard, path } = &self.outputs[index];
        let (renamed, writer) = begin(shard, path, self.work)?;
        let tensors: Vec<_> = shard.tensors().collect();
        let (units, done) = (self.units(&tensors), tensors.iter().map(|_| None).collect());
        let writer = Arc::new(Mutex::new(writer));
        self.open.push(Open { index, tensors, units, taken: 0, writer, renamed, done });
        Ok(self.open.len() - 1)
    }

    /// The tensors of a shard, each by itself or with the others of its layer.
    fn units(&self, tensors: &[Tensor<'_>]) -> VecDeque<Unit> {
        let (mut units, mut layers): (VecDeque<Unit>, HashMap<_, usize>) = Default::default();
        for (number, tensor) in tensors.iter().enumerate() {
            let (place, layer) = (units.len(), self.work.layer(tensor).filter(|_| self.by_layer));
            let place = layer.map_or(place, |layer| *layers.entry(layer).or_insert(place));
            match units.get_mut(place) {
                Some(unit) => unit.push(number),
                None => units.push_back(vec![number]),
            }
        }
        if units.is_empty() {
            // A shard without tensors becomes a file, too.
            units.push_back(Vec::new());
        }
        units
    }

    /// Counts another shard that waits for the disk, and returns whether there is room for it.
    fn begin_finishing(&mut self) -> bool {
        self.finishing += 1;
        self.finishing <= MOST_FINISHING
    }

    /// Notes what has become of a unit. The shard, if that was all.
    fn give(&mut self, index: usize, unit: &[usize], done: Vec<R::Done>) -> Option<Open<'a, R::Done>> {
        let place = self.open.iter().position(|open| open.index == index)?;
        let open = &mut self.open[place];
        for (number, done) in unit.iter().zip(done) {
            open.done[*number] = Some(done);
        }
        open.taken -= 1;
        (open.taken == 0 && open.units.is_empty()).then(|| self.open.swap_remove(place))
    }
}
