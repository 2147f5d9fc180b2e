use godwit_ram::TrackError;

use super::*;

/// Guest that accesses no page.
struct Idle;

impl Faults for Idle {
    fn watch(&self, _: usize, _: PageRange) -> Result<(), TrackError> {
        Ok(())
    }

    fn mapped(&self, _: usize, _: PageRange) -> Result<Vec<PageRange>, TrackError> {
        Ok(Vec::new())
    }

    fn accesses(&self, _: Duration, _: &mut Vec<Access>) -> Result<(), TrackError> {
        Ok(())
    }

    fn show(&self, _: usize, _: PageRange) -> Result<(), TrackError> {
        Ok(())
    }

    fn release(&self, _: usize, _: PageRange) -> Result<(), TrackError> {
        Ok(())
    }

    fn end(&self) {}
}

#[test]
fn a_source_is_released_when_the_guest_runs_and_not_by_its_last_page() {
    let dir = tempfile::tempdir().unwrap();
    let note = dir.path().join("web.missing");
    let region = Region::create(&dir.path().join("web.0.ram"), 2 << 20, None).unwrap();
    drop(MissingPages::create(&note, &[region.pages()]).unwrap());
    let paging_in = PagingIn::resume(Box::new(Idle), vec![Arc::new(region)], &note).unwrap();
    paging_in.hold_source();
    let order = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            paging_in.until_complete().unwrap();
            order.lock().push("complete");
        });
        assert_eq!(paging_in.missing_pages(), 0);
        order.lock().push("runs");
        paging_in.let_source_go();
    });
    assert_eq!(*order.lock(), ["runs", "complete"]);
}

#[test]
fn a_held_source_gets_no_notice_of_a_guest_that_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let note = dir.path().join("web.missing");
    drop(MissingPages::create(&note, &[]).unwrap());
    let paging_in = PagingIn::resume(Box::new(Idle), Vec::new(), &note).unwrap();
    paging_in.hold_source();
    paging_in.abandon();
    assert_eq!(paging_in.until_complete().unwrap_err().code, FailureCode::Cancelled);
}

/// Returns a stream that has sent a hello with that number, and its source's end.
fn welcomed(number: u16) -> (WelcomedStream, Stream) {
    let listener = godwit_lanes::listen((std::net::Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let lane = godwit_types::Lane { from: None, to: listener.local_addr().unwrap() };
    let theirs = godwit_lanes::connect(lane, Duration::from_secs(30)).unwrap();
    let stream = godwit_lanes::accept(&[listener], Duration::from_secs(30)).unwrap().unwrap();
    let (sender, receiver) = (stream.sender(), stream.receiver());
    (WelcomedStream { number, stream, sender, receiver }, theirs)
}

#[test]
fn a_stream_number_is_used_once_per_session() {
    let dir = tempfile::tempdir().unwrap();
    let note = dir.path().join("web.missing");
    let region = Region::create(&dir.path().join("web.0.ram"), 2 << 20, None).unwrap();
    MissingPages::create(&note, &[region.pages()]).unwrap().insert(0, PageRange::new(3, 1));
    let paging_in = PagingIn::resume(Box::new(Idle), vec![Arc::new(region)], &note).unwrap();
    let last = PAGE_IN_STREAM + MAX_PAGE_IN_STREAMS - 1;
    for session in 1..=2 {
        assert_eq!(paging_in.new_session(), session);
        let mut open = Vec::new();
        for number in [PAGE_IN_STREAM, last] {
            let (taken, theirs) = welcomed(number);
            paging_in.admit(session, taken);
            open.push(theirs);
        }
        for number in [PAGE_IN_STREAM, last, last, PAGE_IN_STREAM - 1, last + 1] {
            let (refused, theirs) = welcomed(number);
            paging_in.admit(session, refused);
            assert!(theirs.receiver().receive().is_err(), "stream {number} was taken");
            let state = paging_in.lock();
            assert_eq!((state.session.streams.len(), state.session.reading), (2, 2));
        }
    }
    paging_in.abandon();
}
