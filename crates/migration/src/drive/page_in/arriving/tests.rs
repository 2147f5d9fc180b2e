use godwit_ram::TrackError;

use super::*;

/// Nobody comes to any page.
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
fn a_source_is_let_go_when_the_guest_runs_and_not_by_its_last_page() {
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
            order.lock().unwrap().push("told");
        });
        assert_eq!(paging_in.missing_pages(), 0);
        order.lock().unwrap().push("runs");
        paging_in.let_source_go();
    });
    assert_eq!(*order.lock().unwrap(), ["runs", "told"]);
}

#[test]
fn a_held_source_is_told_nothing_of_a_guest_that_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let note = dir.path().join("web.missing");
    drop(MissingPages::create(&note, &[]).unwrap());
    let paging_in = PagingIn::resume(Box::new(Idle), Vec::new(), &note).unwrap();
    paging_in.hold_source();
    paging_in.abandon();
    assert_eq!(paging_in.until_complete().unwrap_err().code, FailureCode::Cancelled);
}
